"""Checks before calibration that the engine has kernels for the dtypes that the plan chose.

A description may promise more than its engine does.
"""

from __future__ import annotations

import torch

from backquant.backend_config import BackendConfig, list_backends
from backquant.dtypes import dtype_name, storage_dtype
from backquant.errors import EngineError, literal
from backquant.lower import EngineInfo
from backquant.match import Plan
from backquant.match.plan import IntegerDtype, integer_dtypes

_SHOWN = 8


def check_engine_dtypes(plan: Plan, config: BackendConfig, engine: EngineInfo) -> None:
    """Raise ``EngineError`` naming each operator with a dtype that ``engine`` has not."""
    lines = [
        f"{needed.operator}: {needed.role} {needed.dtype}"
        for needed in integer_dtypes(plan, config)
        if not _has(engine, needed)
    ]
    if not lines:
        return
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"… and {len(lines) - _SHOWN} more"]
    raise EngineError(
        f"{config.name} quantizes to dtypes that its engine {engine.describe()} does not compute in",
        where="\n         ".join(lines),
        fix=f"use {_names(engine.activation_dtypes)} activations and {_names(engine.weight_dtypes)} "
        "weights, or keep the reference model:\n"
        f"backquant.quantize(..., backend={_spelled(config)}.set_engine(None))",
    )


def _spelled(config: BackendConfig) -> str:
    known = config.name in list_backends()
    return f"backquant.get_backend_config({literal(config.name)})" if known else "backend"


def _has(engine: EngineInfo, needed: IntegerDtype) -> bool:
    storage = storage_dtype(needed.dtype)
    if needed.role == "weight":
        return storage in engine.weight_dtypes
    return engine.computes_in(storage)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(dtype_name(dtype) for dtype in dtypes)
