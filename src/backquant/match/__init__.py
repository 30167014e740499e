"""Decides what is quantized, and says why the rest is not: patterns against the graph, requests against
constraints. Edits no graph."""

from __future__ import annotations

from backquant.match.decide import make_plan
from backquant.match.default_rules import DefaultRules
from backquant.match.fusion import plan_fusion
from backquant.match.plan import (
    Decision,
    Fusion,
    Match,
    MatchKind,
    Outcome,
    Plan,
    PortUse,
    Predicate,
    Reason,
    RuleKind,
    RuleRef,
    TensorRequest,
)
from backquant.match.roles import CustomMatching
from backquant.match.scale_rules import MeasuredScales, recheck

__all__ = [
    "CustomMatching",
    "Decision",
    "DefaultRules",
    "Fusion",
    "Match",
    "MatchKind",
    "MeasuredScales",
    "Outcome",
    "Plan",
    "PortUse",
    "Predicate",
    "Reason",
    "RuleKind",
    "RuleRef",
    "TensorRequest",
    "make_plan",
    "plan_fusion",
    "recheck",
]
