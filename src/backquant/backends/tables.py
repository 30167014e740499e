"""Lowering tables by engine. A table is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from backquant.errors import EngineError
from backquant.lower import LowerRule

__all__ = ["lowering_rules"]

_TABLES = {
    "x86": "backquant.lower.tables.onednn",
    "onednn": "backquant.lower.tables.onednn",
    "fbgemm": "backquant.lower.tables.quantized",
    "qnnpack": "backquant.lower.tables.quantized",
}


def lowering_rules(engine: str) -> list[LowerRule]:
    """The rules that lower a reference model to the kernels of ``engine``.

    Raises ``EngineError`` when there is no table for it.

    >>> len(lowering_rules("x86")) > 0
    True
    """
    if engine not in _TABLES:
        raise EngineError(
            f"there is no lowering table for the engine {engine!r}",
            where=f"engine: {engine}",
            fix="choose one of " + ", ".join(_TABLES) + ", or no engine for the reference model",
        )
    rules: list[LowerRule] = import_module(_TABLES[engine]).rules()
    return rules
