"""Lowering: a reference model onto an engine's integer kernels, by a table of rules."""

from __future__ import annotations

from backquant.lower.engine import EngineInfo, engine_info
from backquant.lower.lowering import Lowered, lower
from backquant.lower.rule import Emit, KernelUse, LowerRule, Operand, Site

__all__ = [
    "Emit",
    "EngineInfo",
    "KernelUse",
    "LowerRule",
    "Lowered",
    "Operand",
    "Site",
    "engine_info",
    "lower",
]
