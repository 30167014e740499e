"""The one warning of the torch-compatible entry points: what stays float, and why."""

from __future__ import annotations

import inspect
import warnings

from torch import fx

from backquant.calibrate import prepared_parts
from backquant.match import Plan
from backquant.match.float_policy import left_by_default
from backquant.prepare import prepared_state

_SHOWN = 10


def warn_of_skipped(plan: Plan, *others: str) -> None:
    """One warning for all operators that a QConfig asked for and the backend refused, and ``others``.

    What the backend leaves in float by default stands in the report alone. The warning points at the line of
    the user that called the entry point.
    """
    lines = [*_skipped(plan), *others]
    if lines:
        warnings.warn("\n".join(lines), stacklevel=_level_of_caller())


def skipped_in_standalone(prepared: fx.GraphModule) -> list[str]:
    """The same of the standalone modules of ``prepared``, for ``others``.

    Raises ``UsageError`` when the model is not prepared.
    """
    lines: list[str] = []
    for prefix, part in prepared_parts(prepared):
        found = _skipped(prepared_state(part).plan) if prefix else []
        if found:
            lines += [f"in standalone module {prefix.rstrip('.')!r}: {found[0]}", *found[1:]]
    return lines


def _skipped(plan: Plan) -> list[str]:
    refused = [
        decision
        for decision in plan.decisions.values()
        if decision.rule is not None
        and decision.reasons
        and decision.match is not None
        and not decision.quantized
        and decision.asked_activation is not None
        and not left_by_default(plan, decision)
    ]
    lines = [str(decision) for decision in refused[:_SHOWN]]
    if refused:
        lines.insert(0, f"{len(refused)} operators stay float on {plan.backend}:")
    if len(refused) > _SHOWN:
        lines.append(f"… and {len(refused) - _SHOWN} more")
    return lines


def _level_of_caller() -> int:
    """The ``stacklevel`` for which a warning of the function that asks points at the user's line."""
    level, frame = 1, inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("backquant."):
        level, frame = level + 1, frame.f_back
    return level
