"""Buying accuracy back: steps that change what calibration chose, kept where the outputs get better."""

from __future__ import annotations

from backquant.accuracy.recipes.recipe import BUILT_IN, Recipe, StepResult, followed, recipe_of

__all__ = ["BUILT_IN", "Recipe", "StepResult", "followed", "recipe_of"]
