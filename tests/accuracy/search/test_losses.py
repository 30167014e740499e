"""What units lose alone counts as what a combination loses: over all batches together."""

from __future__ import annotations

import pytest
import torch
from tests.accuracy.conftest import Case

from backquant.accuracy.figures import ErrorSums, add_errors, float_tensors
from backquant.accuracy.recipes.draft import Draft
from backquant.accuracy.search.work import losses_alone, pooled
from backquant.accuracy.twin import Walk


def test_a_unit_alone_loses_what_it_loses_of_all_batches(cases: dict[str, Case]) -> None:
    ready = cases["trace"].ready
    twin = Draft(ready.prepared, ready.conversion).twin()
    batches = [cases["trace"].data[0], cases["trace"].data[1][:1] * 1e-3]
    units = [(place,) for place in range(len(twin.groups))]
    found, values = pooled([losses_alone(twin, units, [], batch) for batch in batches])
    assert values == [] and len(found) == len(units) > 2
    for place, loss in enumerate(found):
        sums: list[ErrorSums] = []
        with torch.no_grad():
            for batch in batches:
                inputs = twin.inputs(batch, 0)
                wanted, alone = (
                    float_tensors(Walk(twin, inputs, which).output())
                    for which in (lambda _: False, lambda group, own=place: group == own)
                )
                add_errors(sums, wanted, alone)
        assert loss == pytest.approx(sums[0].loss)


def test_a_batch_that_gives_next_to_nothing_counts_for_as_little() -> None:
    """By each batch's own measure the second, of which half is lost, would count as much as the first."""
    speech, silence = (
        [[[1.0, 4.0]], [[0.01, 0.0]], [[0.0, 0.04]]],
        [[[1e-6, 0.0]], [[5e-7, 0.0]], [[0.0, 0.0]]],
    )
    units, values = pooled([speech, silence])
    assert units == [pytest.approx(0.005, rel=1e-3)] and values == [pytest.approx(0.005)]
    assert pooled([[[[1.0]], [[float("inf")]], []]])[0] == [1e4]
