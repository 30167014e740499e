"""What each unit costs at the outputs when it alone is quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from backquant.accuracy.figures import ErrorSums, add_errors, bounded_loss, float_tensors
from backquant.accuracy.recipes.ranges import rounded
from backquant.accuracy.twin import Twin, Walk
from backquant.dtypes import ObservedQParams

#: Of one batch, as a file holds it: the signal of each output (in a list of one), the noise at each output
#: of each unit, and of each value.
Noise: TypeAlias = list[list[list[float]]]

#: Forward passes that a sensitivity may take for each batch of calibration.
PASSES = 6


def batches_that_fit(units: int, calibration: int, held: int) -> int:
    """How many batches are looked at, so that a search costs a few calibrations: one unit costs about half of
    a forward pass.

    >>> batches_that_fit(units=20, calibration=8, held=8), batches_that_fit(400, 1, 8)
    (4, 1)
    """
    return max(1, min(held, int(PASSES * calibration / max(1.0, units / 2))))


def losses_alone(
    twin: Twin,
    units: Sequence[tuple[int, ...]],
    values: Sequence[str],
    batch: Any,
    told: Callable[[], None] = lambda: None,
) -> Noise:
    """The power of the outputs, and that of their error: with the groups of one unit quantized, for each
    unit; with the value of one node rounded as its first observer does, for each of ``values``.

    What lies before is computed once for all. ``told``: called for each unit and value.
    """
    qparams = _rounding(twin)
    steps: list[tuple[int, bool, int]] = []
    for place, groups in enumerate(units):
        if groups:
            steps.append((min(twin.first(group) for group in groups), True, place))
    steps += [(twin.place[name] + 1, False, i) for i, name in enumerate(values) if name in qparams]
    with torch.no_grad():
        inputs = twin.inputs(batch, 0)
        wanted = float_tensors(Walk(twin, inputs, lambda _: False).output())
        nothing: list[ErrorSums] = []
        add_errors(nothing, wanted, wanted)
        found = [[[0.0] * len(wanted)] * len(places) for places in (units, values)]
        walk = Walk(twin, inputs, lambda _: False)
        for first, is_unit, place in sorted(steps):
            walk.to(first)
            if is_unit:
                fork = walk.fork(frozenset(units[place]).__contains__)
            else:
                name = values[place]
                fork = walk.fork(lambda _: False)
                fork.values[name] = rounded(fork.values.get(name), qparams[name])
            sums: list[ErrorSums] = []
            add_errors(sums, wanted, float_tensors(fork.output()))
            found[not is_unit][place] = [each.noise for each in sums]
            told()
    return [[[each.signal for each in nothing]], *found]


def pooled(batches: Sequence[Noise]) -> tuple[list[float], list[float]]:
    """The relative error power of the outputs for each unit and each value, over all batches together: as of
    a combination that is tried. A batch whose outputs are next to nothing counts for as little.

    >>> loud, silent = [[[100.0]], [[1.0]], []], [[[0.001]], [[0.001]], []]
    >>> units, values = pooled([loud, silent])
    >>> round(units[0], 4), values
    (0.01, [])
    """
    signals = [sum(each) for each in zip(*(batch[0][0] for batch in batches), strict=True)]

    def losses(kind: int) -> list[float]:
        return [
            bounded_loss(
                [
                    ErrorSums(signal=signal, noise=sum(noises))
                    for signal, noises in zip(signals, zip(*of_batches, strict=True), strict=True)
                ]
            )
            for of_batches in zip(*(batch[kind] for batch in batches), strict=True)
        ]

    return losses(1), losses(2)


def _rounding(twin: Twin) -> dict[str, ObservedQParams]:
    """The qparams of each value that is observed with one scale, by the node that gives it."""
    found: dict[str, ObservedQParams] = {}
    for site in twin.record.sites.sites:
        qparams = twin.record.qparams.get(site.name)
        if qparams is None or qparams.scale is None or qparams.scale.numel() != 1:
            continue
        if site.role.value not in ("weight", "bias"):
            found.setdefault(site.value, qparams)
    return found
