"""Check of the integer reference: all that the plan quantizes is computed on integers."""

from __future__ import annotations

from collections.abc import Sequence

from backquant.errors import EngineError, literal
from backquant.match.plan import Plan, Reason
from backquant.reason_codes import ReasonCode

# Operators that read or give floats, because the description or the mapping says so, compute in float.
_FLOAT = (ReasonCode.FLOAT_IN_REFERENCE, ReasonCode.FLOAT_INPUT, ReasonCode.FLOAT_OUTPUT)
_SHOWN = 8


def check_integers(plan: Plan, left_in_float: Sequence[Reason]) -> None:
    """Raise ``EngineError`` naming what the plan quantizes and no rule could take."""
    quantized = {
        name
        for match in plan.matches
        if plan.decisions[match.anchor].quantized
        for name in match.nodes
    }
    refused = [r for r in left_in_float if r.node in quantized and r.rule not in _FLOAT]
    if not refused:
        return
    lines = [f"{r.node}: {r.asked}: {r.admitted}" for r in refused[:_SHOWN]]
    if len(refused) > _SHOWN:
        lines.append(f"… and {len(refused) - _SHOWN} more")
    node = refused[0].node
    decision = plan.decisions.get(node)
    path = decision.module_path if decision is not None and decision.module_path else node
    raise EngineError(
        "operators are quantized in a way that has no integer reference",
        where="\n         ".join(lines),
        fix=f"qconfig_mapping.set_module_name({literal(path)}, None), or the reference model, which computes "
        "them in float",
    )
