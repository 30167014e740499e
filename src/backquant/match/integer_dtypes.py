"""The integer dtypes that a plan computes in, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from backquant.backend_config import BackendConfig
from backquant.match.plan import Plan


@dataclass(frozen=True)
class IntegerDtype:
    """``operator`` computes on integers of ``dtype`` in one ``role``: input, output or weight."""

    operator: str
    role: str
    dtype: torch.dtype


def integer_dtypes(plan: Plan, config: BackendConfig) -> Iterator[IntegerDtype]:
    """The dtypes of each match that is quantized statically.

    What computes in float, dynamically or on weights alone needs no integer activations and is left out.
    """
    entries = config.shared_configs
    for match in plan.matches:
        decision = plan.decisions[match.anchor]
        if not decision.quantized or decision.dtype_config is None or match.entry < 0:
            continue
        chosen = entries[match.entry].dtype_configs[decision.dtype_config]
        if chosen.is_dynamic or not _is_integer(chosen.input_dtype, chosen.output_dtype):
            continue
        operator = f"{decision.module_path or match.anchor} ({match.pattern})"
        for role in ("input", "output", "weight"):
            dtype = getattr(chosen, f"{role}_dtype")
            if _is_integer(dtype):
                yield IntegerDtype(operator, role, dtype)


def _is_integer(*dtypes: torch.dtype | None) -> bool:
    return all(d is not None and not d.is_floating_point and not d.is_complex for d in dtypes)
