"""Lowering: a reference model onto an engine's integer kernels, by a table of rules."""

from __future__ import annotations

from backquant.lower.engine import (
    Engine,
    engine_here,
    engine_info,
    find_engine,
    list_engines,
)
from backquant.lower.lowering import lower
from backquant.lower.machine import EngineInfo, MachineFacts
from backquant.lower.rule import Emit, KernelUse, Lowered, LowerRule, Operand, Site, operand

__all__ = [
    "Emit",
    "Engine",
    "EngineInfo",
    "KernelUse",
    "LowerRule",
    "Lowered",
    "MachineFacts",
    "Operand",
    "Site",
    "engine_here",
    "engine_info",
    "find_engine",
    "list_engines",
    "lower",
    "operand",
]
