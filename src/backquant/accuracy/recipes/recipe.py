"""Recipes: which steps, in which order. Data, in YAML, that can be shared."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from backquant.accuracy.recipes.bench import ENOUGH_SAMPLES
from backquant.accuracy.recipes.steps import STEPS
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

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a file holds it."""
        limit = {} if self.most_inputs is None else {"most_inputs": self.most_inputs}
        part = {} if self.samples == ENOUGH_SAMPLES else {"samples": self.samples}
        biases = {"biases": True} if self.biases else {}
        least = self.sample_decibels
        ranges = {} if least is None else {"sample_decibels": least}
        return {"name": self.name, "steps": list(self.steps), **limit, **part, **biases, **ranges}


def recipe_of(given: str | os.PathLike[str] | Sequence[str]) -> Recipe:
    """A built-in recipe by name, one in a YAML file, or a list of steps.

    Raises ``UsageError`` for an unknown name, an unknown step, or a file that holds no recipe.

    >>> recipe_of("default").steps, recipe_of(["gptq"]).name
    ((), 'gptq')
    """
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
