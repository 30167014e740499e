from __future__ import annotations

import pytest
import torch
from tests.accuracy.conftest import Case

from backquant.accuracy.reference_run import placeholders
from backquant.accuracy.twin import Twin, Walk


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_its_two_ends_are_the_float_model_and_the_reference_model(
    cases: dict[str, Case], capture: str
) -> None:
    case = cases[capture]
    reference = case.ready.reference()
    twin = Twin(case.ready.prepared, reference)
    inputs = placeholders(twin.float_graph, case.data[0], 0)
    with torch.no_grad():
        in_float = Walk(twin, inputs, lambda _: False).output()
        quantized = Walk(twin, inputs, lambda _: True).output()
        assert torch.equal(in_float, twin.float_graph(case.data[0]))
        assert torch.allclose(in_float, case.model(case.data[0]), atol=1e-5)
        [found] = torch.utils._pytree.tree_leaves(reference(case.data[0]))
    assert torch.equal(quantized, found)


def test_one_group_in_float_is_what_conversion_makes_of_it(cases: dict[str, Case]) -> None:
    """A match that stays float after all has the same effect in the conversion as in a walk."""
    from backquant.match.plan import Reason

    case = cases["trace"]
    twin = Twin(case.ready.prepared, case.ready.reference())
    inputs = placeholders(twin.float_graph, case.data[0], 0)
    plan = twin.record.plan
    for index, group in enumerate(twin.groups):
        if len(group.anchors) > 1:
            continue
        [match] = [i for i, m in enumerate(plan.matches) if m.anchor == group.anchors[0]]
        reason = Reason(group.anchors[0], "asked", "float", "")
        other = case.ready.reference({match: reason})
        with torch.no_grad():
            walked = Walk(twin, inputs, lambda g, i=index: g != i).output()
            [found] = torch.utils._pytree.tree_leaves(other(case.data[0]))
        assert torch.allclose(walked, found, atol=1e-6), group.name


def test_values_are_dropped_after_their_last_use(cases: dict[str, Case]) -> None:
    case = cases["trace"]
    twin = Twin(case.ready.prepared, case.ready.reference())
    walk = Walk(twin, placeholders(twin.float_graph, case.data[0], 0), lambda _: True)
    most = 0
    with torch.no_grad():
        for end in range(1, len(twin.nodes)):
            walk.to(end)
            most = max(most, len(walk.values))
    assert most <= 4
