"""Where recipes work: data held in memory, the outputs that are wanted, and what a draft loses.

Steps fit on the first part of the batches and are judged on the last quarter, where there are two batches or
more: what does not help there is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from backquant.accuracy.figures import decibels
from backquant.accuracy.nodes import placeholders
from backquant.accuracy.outputs import FloatOutputs
from backquant.accuracy.recipes.draft import Change, Draft, Together
from backquant.accuracy.twin import Twin, Walk
from backquant.calibrate.group import ALONE, Ranks, held_by_all
from backquant.prepare import unobserved

#: Batches that are held; more add little to what sums over them say.
MOST_BATCHES = 64


class Bench:
    """The data and the float outputs for one model.

    All ``ranks`` hold the same data, and share the batches that a draft is judged on. ``most_inputs``: as
    the recipe has it.
    """

    def __init__(
        self,
        draft: Draft,
        batches: Iterable[Any],
        ranks: Ranks = ALONE,
        most_inputs: int | None = None,
    ) -> None:
        self.ranks, self.most_inputs = ranks, most_inputs
        self.held = held = held_by_all(ranks, batches, MOST_BATCHES)
        last = max(1, len(held) // 4) if len(held) > 1 else 0
        self.fitting = held[: len(held) - last]
        self.judging = held[len(held) - last :] or held
        self._outputs = FloatOutputs(unobserved(draft.prepared), self.judging, ranks)

    def loss(self, draft: Draft) -> float:
        """What the reference model of ``draft`` loses at its outputs: relative error power."""
        return self._outputs.loss(draft.reference(), "judging a recipe")

    def sqnr(self, draft: Draft) -> float:
        """The same in dB."""
        return decibels(self.loss(draft))

    def walks(
        self, twin: Twin, quantized: Callable[[int], bool], batches: Sequence[Any] | None = None
    ) -> Iterator[Walk]:
        """A walk over each batch to fit on, or of ``batches``."""
        for index, batch in enumerate(self.fitting if batches is None else batches):
            yield Walk(twin, placeholders(twin.float_graph, batch, index), quantized)

    def kept(
        self, draft: Draft, changes: Sequence[Change | Together], before: float
    ) -> tuple[Draft, float, int]:
        """``draft`` with those of ``changes`` that help, its loss, and how many they are.

        All are tried; where they do not help, each half is tried by itself, and so on, with at most
        16 trials.
        """
        left = [16]
        apart = [(change,) if isinstance(change, Change) else change for change in changes]
        return self._kept(draft, apart, before, left)

    def _kept(
        self, draft: Draft, changes: list[Together], before: float, left: list[int]
    ) -> tuple[Draft, float, int]:
        if not changes or left[0] <= 0:
            return draft, before, 0
        left[0] -= 1
        tried = draft.changed(change for together in changes for change in together)
        loss = self.loss(tried)
        if loss < before:
            return tried, loss, len(changes)
        if len(changes) == 1:
            return draft, before, 0
        middle, count = len(changes) // 2, 0
        for half in (changes[:middle], changes[middle:]):
            draft, before, helped = self._kept(draft, half, before, left)
            count += helped
        return draft, before, count
