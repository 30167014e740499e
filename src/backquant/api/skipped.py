"""The one warning of the torch-compatible entry points: what stays float, and why."""

from __future__ import annotations

import warnings

from backquant.match import Plan

__all__ = ["warn_of_skipped"]

_SHOWN = 10


def warn_of_skipped(plan: Plan, *others: str) -> None:
    """One warning for all operators that a QConfig asked for and the backend refused, and ``others``.

    It points at the line that called the entry point.

    >>> warn_of_skipped(Plan("x86"))
    """
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
    lines += others
    if lines:
        warnings.warn("\n".join(lines), stacklevel=3)
