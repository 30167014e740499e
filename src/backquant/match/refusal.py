"""One rule of a description that a request breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from backquant.backend_config import BackendConfig, DTypeConfig, DTypeWithConstraints
from backquant.match.plan import Match, Plan, TensorRequest
from backquant.reason_codes import ReasonCode


@dataclass(frozen=True)
class Refusal:
    """One rule that is broken."""

    rule: ReasonCode
    asked: str
    admitted: str
    fix: str = ""


Rule: TypeAlias = Callable[[TensorRequest, DTypeWithConstraints], Refusal | None]


# The dtype config of the backend's description by which each quantized operator was admitted.


def chosen_dtype_config(plan: Plan, backend: BackendConfig, match: Match) -> DTypeConfig | None:
    """The dtype config that admitted a match; None if it stays float, or is a standalone or custom module."""
    decision = plan.decisions[match.anchor]
    if not decision.quantized or decision.dtype_config is None or match.entry < 0:
        return None
    return backend.shared_configs[match.entry].dtype_configs[decision.dtype_config]


def described_by_node(plan: Plan, backend: BackendConfig) -> dict[str, DTypeConfig]:
    """``chosen_dtype_config`` for every operator of the matches, by the name of its node."""
    found: dict[str, DTypeConfig] = {}
    for match in plan.matches:
        config = chosen_dtype_config(plan, backend, match)
        if config is not None:
            found.update(dict.fromkeys(match.nodes, config))
    return found
