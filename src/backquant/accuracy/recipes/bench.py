"""What the steps of a recipe work on: batches held in memory, the outputs of the float model for them, and
the error of a draft.

With two batches or more, the last quarter of them (at least one) judges, and steps fit on the
others: a change that does not help on the batches that judge is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from backquant.accuracy.figures import decibels
from backquant.accuracy.nodes import placeholders
from backquant.accuracy.outputs import FloatOutputs
from backquant.accuracy.recipes.draft import Change, Draft, Together
from backquant.accuracy.twin import Twin, Walk
from backquant.calibrate.group import ALONE, Ranks, held_by_all
from backquant.prepare import unobserved

#: Batches that are held; more add little to what sums over them say.
MOST_BATCHES = 64
_SAMPLES = 8  # whose differences say something


class Bench:
    """The data and the float outputs for one model.

    In a process group all ranks hold the same data, and divide the batches on which a draft is judged.
    ``most_inputs``: see ``Recipe``.
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

    def losses(self, draft: Draft) -> torch.Tensor:
        """The output error of the reference model of ``draft``, for each sample: its share of the power of
        the error, relative to the power of the float outputs.
        """
        return self._outputs.losses(draft.reference(), "judging a recipe")

    def loss(self, draft: Draft) -> float:
        """The sum of ``losses``."""
        return float(self.losses(draft).sum())

    def sqnr(self, draft: Draft) -> float:
        """``loss`` as a signal-to-quantization-noise ratio in dB."""
        return decibels(self.loss(draft))

    def walks(
        self, twin: Twin, quantized: Callable[[int], bool], batches: Sequence[Any] | None = None
    ) -> Iterator[Walk]:
        """A walk over each batch to fit on, or of ``batches``."""
        for index, batch in enumerate(self.fitting if batches is None else batches):
            yield Walk(twin, placeholders(twin.float_graph, batch, index), quantized)

    def kept(
        self, draft: Draft, changes: Sequence[Change | Together], before: torch.Tensor
    ) -> tuple[Draft, torch.Tensor, int]:
        """``draft`` with those of ``changes`` that lower its error, the errors it has then, and how many
        changes that are. ``before``: the errors without them.

        All changes are tried together; where that does not help, each half is tried by itself, and so on,
        with at most 16 trials.
        """
        left = [16]
        apart = [(change,) if isinstance(change, Change) else change for change in changes]
        return self._kept(draft, apart, before, left)

    def _kept(
        self, draft: Draft, changes: list[Together], before: torch.Tensor, left: list[int]
    ) -> tuple[Draft, torch.Tensor, int]:
        if not changes or left[0] <= 0:
            return draft, before, 0
        left[0] -= 1
        tried = draft.changed(change for together in changes for change in together)
        losses = self.losses(tried)
        if helps(before, losses):
            return tried, losses, len(changes)
        if len(changes) == 1:
            return draft, before, 0
        middle, count = len(changes) // 2, 0
        for half in (changes[:middle], changes[middle:]):
            draft, before, helped = self._kept(draft, half, before, left)
            count += helped
        return draft, before, count


def helps(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether samples lose less on the whole, and by more than they differ by chance: than the standard error
    of the sum. Of less than ``_SAMPLES`` the sum alone is asked.

    >>> before = torch.full((16,), 0.1)
    >>> helps(before, before * 0.99), helps(before, before)
    (True, False)
    >>> one = before.clone()
    >>> one[0] = 0.01  # of one sample alone
    >>> one[1:] += 0.005
    >>> helps(before, one)
    False
    """
    gained = (before - after).double()
    total = float(gained.sum())
    if not total > 0:
        return False
    count = len(gained)
    return count < _SAMPLES or total > float(gained.std()) * count**0.5
