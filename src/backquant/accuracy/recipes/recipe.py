"""Recipes: which steps, in which order, as data that can be shared; and following one, step by step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import yaml

from backquant.accuracy.figures import decibel_text, decibels
from backquant.accuracy.recipes.bench import ENOUGH_SAMPLES, Bench
from backquant.accuracy.recipes.draft import Change, Draft, Together
from backquant.accuracy.recipes.steps import ADDING, STEPS
from backquant.calibrate.group import ALONE, Ranks, by_rank_0
from backquant.errors import UsageError, did_you_mean

_FIELDS = {"name", "steps", "most_inputs", "samples", "biases", "sample_decibels"}
BUILT_IN = ("default", "none", "better", "best")


@dataclass(frozen=True)
class Recipe:
    """A name, and the steps in order.

    ``most_inputs``: of an output of a layer whose weights are rounded or clipped; wider layers, of which that
    costs the cube, are left as they are. ``None``: no limit. ``samples``: how many of the data steps fit and
    judge on; more where they are small. ``biases``: whether biases are corrected by what
    is seen while the model is calibrated, where that costs little. ``sample_decibels``: layers of which the
    quietest samples have less over the noise of rounding are scaled sample by sample; ``None``: as without.

    >>> Recipe("mine", ("ranges", "bias-correction")).to_dict()
    {'name': 'mine', 'steps': ['ranges', 'bias-correction']}
    """

    name: str
    steps: tuple[str, ...] = ()
    most_inputs: int | None = None
    samples: int = ENOUGH_SAMPLES
    biases: bool = False
    sample_decibels: float | None = None

    def on_weights(self) -> Recipe:
        """Without what adds operators or biases, which checkpoints have no place for.

        >>> recipe_of("better").on_weights().steps
        ('weight-clipping', 'gptq')
        """
        steps = tuple(step for step in self.steps if step not in ADDING)
        return replace(self, steps=steps, biases=False, sample_decibels=None)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a file holds it."""
        limit = {} if self.most_inputs is None else {"most_inputs": self.most_inputs}
        part = {} if self.samples == ENOUGH_SAMPLES else {"samples": self.samples}
        biases = {"biases": True} if self.biases else {}
        least = self.sample_decibels
        ranges = {} if least is None else {"sample_decibels": least}
        return {"name": self.name, "steps": list(self.steps), **limit, **part, **biases, **ranges}


def recipe_of(given: Recipe | str | os.PathLike[str] | Sequence[str]) -> Recipe:
    """A built-in recipe by name, one in a YAML file, a list of steps, or a recipe as it is.

    Raises ``UsageError`` for an unknown name, an unknown step, or a file that holds no recipe.

    >>> recipe_of("default").steps, recipe_of(["gptq"]).name
    ((), 'gptq')
    """
    if isinstance(given, Recipe):
        return given
    if not isinstance(given, str | os.PathLike):
        if not isinstance(given, Sequence) or not all(isinstance(step, str) for step in given):
            raise _refused(f"{type(given).__name__} is no recipe", f"recipe={given!r}")
        return _checked(Recipe(", ".join(given), tuple(given)), f"recipe={list(given)!r}")
    name = os.fspath(given)
    if name in BUILT_IN:
        text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        return _read(text, name)
    if not Path(name).is_file():
        raise _refused(
            f"there is no recipe {name!r}",
            f"recipe={name!r}",
            did_you_mean(name, BUILT_IN, _KNOWN),
        )
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused("the file is no recipe", f"recipe={name!r}") from error
    return _read(text, name)


def _read(text: str, where: str) -> Recipe:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _refused("the file is no recipe", where) from error
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise _refused("the file is no recipe", where)
    steps, most, biases = data.get("steps"), data.get("most_inputs"), data.get("biases", False)
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise _refused("the file is no recipe", where)
    if unknown := sorted(set(map(str, data)) - _FIELDS):
        raise _refused(f"a recipe has no {unknown[0]!r}", where)
    if most is not None and (type(most) is not int or most < 1):
        raise _refused(f"most_inputs is {most!r}", where, "most_inputs: 4096")
    samples = data.get("samples", ENOUGH_SAMPLES)
    if type(samples) is not int or samples < 1:
        raise _refused(f"samples is {samples!r}", where, f"samples: {ENOUGH_SAMPLES}")
    if type(biases) is not bool:
        raise _refused(f"biases is {biases!r}", where, "biases: true")
    least = data.get("sample_decibels")
    if least is not None and (type(least) not in (int, float) or not 0 <= least < math.inf):
        raise _refused(f"sample_decibels is {least!r}", where, "sample_decibels: 33")
    return _checked(Recipe(data["name"], tuple(steps), most, samples, biases, least), where)


def _checked(recipe: Recipe, where: str) -> Recipe:
    for step in recipe.steps:
        if step not in STEPS:
            known = ", ".join(STEPS)
            fix = did_you_mean(step, STEPS, f"one of {known}")
            raise _refused(f"there is no step {step!r}", where, fix)
    return recipe


_KNOWN = 'recipe="better", recipe=["ranges", "bias-correction"], or a YAML file: {name: mine, steps: [gptq]}'


def _refused(what: str, where: str, fix: str = _KNOWN) -> UsageError:
    return UsageError(what, where=where, fix=fix)


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
