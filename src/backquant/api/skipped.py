"""The one warning of the torch-compatible entry points: what stays float, and why."""

from __future__ import annotations

import warnings

from torch import fx

from backquant.calibrate import prepared_parts
from backquant.match import Plan
from backquant.prepare import prepared_state

__all__ = ["skipped_inside", "warn_of_skipped"]

_SHOWN = 10


def warn_of_skipped(plan: Plan, *others: str) -> None:
    """One warning for all operators that a QConfig asked for and the backend refused, and ``others``.

    It points at the line that called the entry point.

    >>> warn_of_skipped(Plan("x86"))
    """
    lines = [*_skipped(plan), *others]
    if lines:
        warnings.warn("\n".join(lines), stacklevel=3)


def skipped_inside(prepared: fx.GraphModule) -> list[str]:
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
    ]
    lines = [str(decision) for decision in refused[:_SHOWN]]
    if refused:
        lines.insert(0, f"{len(refused)} operators stay float on {plan.backend}:")
    if len(refused) > _SHOWN:
        lines.append(f"… and {len(refused) - _SHOWN} more")
    return lines
