"""Whether an engine computes in the dtypes that a plan chose, asked before anything is measured.

A description may promise more than its engine does. Only static integer quantization is checked: what
computes in float, dynamically or on weights alone needs no integer activations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.dtypes import dtype_name, storage_dtype
from backquant.errors import EngineError
from backquant.lower import EngineInfo
from backquant.match import Plan

__all__ = ["check_engine_dtypes"]

_SHOWN = 8


def check_engine_dtypes(plan: Plan, config: BackendConfig, engine: EngineInfo) -> None:
    """Raise ``EngineError`` naming each operator with a dtype that ``engine`` has not.

    >>> from backquant.lower import engine_info
    >>> check_engine_dtypes(Plan("x86"), BackendConfig("x86"), engine_info("x86"))
    """
    entries = config.configs
    lines = []
    for match in plan.matches:
        decision = plan.decisions[match.anchor]
        if not decision.quantized or decision.dtype_config is None or match.entry < 0:
            continue
        chosen = entries[match.entry].dtype_configs[decision.dtype_config]
        for role, dtype in _lacking(chosen, engine):
            lines.append(
                f"{decision.module_path or match.anchor} ({match.pattern}): {role} {dtype}"
            )
    if not lines:
        return
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"… and {len(lines) - _SHOWN} more"]
    raise EngineError(
        f"{config.name} quantizes to dtypes that its engine {engine.describe()} does not compute in",
        where="\n         ".join(lines),
        fix=f"use {_names(engine.activation_dtypes)} activations and {_names(engine.weight_dtypes)} "
        "weights, or keep the reference model:\n"
        f'backquant.quantize(..., backend=get_backend_config("{config.name}").set_engine(None))',
    )


def _lacking(config: DTypeConfig, engine: EngineInfo) -> Iterator[tuple[str, torch.dtype]]:
    activations = (("input", config.input_dtype), ("output", config.output_dtype))
    if config.is_dynamic or not all(map(_is_integer, (dtype for _, dtype in activations))):
        return
    weight = config.weight_dtype
    for role, dtype in activations:
        if dtype is not None and not engine.computes_in(storage_dtype(dtype)):
            yield role, dtype
    if (
        weight is not None
        and _is_integer(weight)
        and storage_dtype(weight) not in engine.weight_dtypes
    ):
        yield "weight", weight


def _is_integer(dtype: torch.dtype | None) -> bool:
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(dtype_name(dtype) for dtype in dtypes)
