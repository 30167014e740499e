"""Where recipes work: data held in memory, the outputs that are wanted, and what a draft loses.

Steps fit on the first part of the batches and are judged on the last quarter, where there are two batches or
more: what does not help there is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from backquant.accuracy.figures import ErrorSums, decibels, float_tensors, loss_of
from backquant.accuracy.nodes import placeholders
from backquant.accuracy.recipes.draft import Change, Draft, Together
from backquant.accuracy.twin import Twin, Walk
from backquant.graph import as_arguments
from backquant.prepare import unobserved

#: Batches that are held; more add little to what sums over them say.
MOST_BATCHES = 64


class Bench:
    """The data and the float outputs for one model; ``evaluations`` counts what was judged."""

    def __init__(self, draft: Draft, batches: Iterable[Any]) -> None:
        self.held = held = [batch for _, batch in zip(range(MOST_BATCHES), batches, strict=False)]
        last = max(1, len(held) // 4) if len(held) > 1 else 0
        self.fitting = held[: len(held) - last]
        self.judging = held[len(held) - last :] or held
        self.evaluations = 0
        graph = unobserved(draft.prepared)
        with torch.no_grad():
            self.wanted = [float_tensors(_called(graph, batch)) for batch in self.judging]

    def loss(self, draft: Draft) -> float:
        """What the reference model of ``draft`` loses at its outputs: relative error power."""
        self.evaluations += 1
        reference = draft.reference()
        sums: list[ErrorSums] = []
        with torch.no_grad():
            for batch, wanted in zip(self.judging, self.wanted, strict=True):
                found = float_tensors(_called(reference, batch))
                for position, (one, two) in enumerate(zip(wanted, found, strict=True)):
                    if position == len(sums):
                        sums.append(ErrorSums())
                    sums[position].add(one, two)
        return loss_of(sums)

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
        self, draft: Draft, changes: Sequence[Change | Together], before: float, most: int = 16
    ) -> tuple[Draft, float, int]:
        """``draft`` with those of ``changes`` that help, its loss, and how many they are.

        All are tried; where they do not help, each half is tried by itself, and so on, with at most
        ``most`` trials.
        """
        left = [most]
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


def _called(module: torch.fx.GraphModule, batch: Any) -> Any:
    args, kwargs = as_arguments(batch)
    return torch.nn.Module.__call__(module, *args, **kwargs)
