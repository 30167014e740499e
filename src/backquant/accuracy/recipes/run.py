"""Following a recipe: its steps one after the other, each kept as far as it lowers the error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from backquant.accuracy.figures import decibel_text, decibels
from backquant.accuracy.recipes.bench import Bench
from backquant.accuracy.recipes.draft import Change, Draft, Together
from backquant.accuracy.recipes.recipe import Recipe
from backquant.accuracy.recipes.steps import STEPS
from backquant.calibrate.group import ALONE, Ranks, by_rank_0


@dataclass(frozen=True)
class StepResult:
    """What one step gained: SQNR of the outputs in dB on all batches, and how many of the changes that it
    proposed were kept.

    >>> print(StepResult("gptq", 21.0, 24.5, 8, 9, 1.5))
    gptq: 21.0 dB → 24.5 dB, 8 of 9 changes kept
    """

    step: str
    before: float
    after: float
    kept: int
    proposed: int
    seconds: float

    def __str__(self) -> str:
        kept = f"{self.kept} of {self.proposed} changes kept"
        return f"{self.step}: {decibel_text(self.before)} → {decibel_text(self.after)}, {kept}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def followed(
    recipe: Recipe,
    draft: Draft,
    batches: Iterable[Any],
    told: Callable[[int, int | None], None] | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Draft, tuple[StepResult, ...]]:
    """``draft`` with the changes that ``recipe`` finds, and what each step gained. ``told`` is called after
    each step.

    All ``ranks`` hold the same draft and batches of their own; all of them follow the proposals of rank 0.

    Raises ``CalibrationError`` and ``InputError`` as calibration does.
    """
    draft = draft.settled()
    bench = Bench(draft, batches, ranks, recipe.most_inputs, recipe.samples)
    losses, results = bench.losses(draft), []
    for position, name in enumerate(recipe.steps):
        before, start = losses.total, time.monotonic()
        with torch.no_grad():
            own = list(STEPS[name](draft, bench))
        make: Callable[[], list[Change | Together]] = partial(list, own)
        changes = by_rank_0(ranks, f"following {name}", make)
        draft, losses, kept = bench.kept(draft, changes, losses)
        seconds = round(time.monotonic() - start, 2)
        results.append(
            StepResult(name, decibels(before), decibels(losses.total), kept, len(changes), seconds)
        )
        if told is not None:
            told(position + 1, len(recipe.steps))
    return draft, tuple(results)
