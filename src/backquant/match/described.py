"""What a description says of each operator that it has quantized."""

from __future__ import annotations

from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.match.plan import Match, Plan


def chosen_dtype_config(plan: Plan, backend: BackendConfig, match: Match) -> DTypeConfig | None:
    """The dtype config that a match is quantized by; None if it stays float, or no entry is behind it."""
    decision = plan.decisions[match.anchor]
    if not decision.quantized or decision.dtype_config is None or match.entry < 0:
        return None
    return backend.configs[match.entry].dtype_configs[decision.dtype_config]


def described_by_node(plan: Plan, backend: BackendConfig) -> dict[str, DTypeConfig]:
    """The same for every operator of the matches, by its name."""
    found: dict[str, DTypeConfig] = {}
    for match in plan.matches:
        config = chosen_dtype_config(plan, backend, match)
        if config is not None:
            found.update(dict.fromkeys(match.nodes, config))
    return found
