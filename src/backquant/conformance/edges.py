"""One step outside of a dtype config: requests that it does not admit, each for one reason.

Beside each stands the dtype config that would admit it, with which the engine is asked past the description.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from backquant.backend_config import DTypeConfig, DTypeWithConstraints
from backquant.dtypes import integer_range, is_quantized
from backquant.match.fixes import ObserverFix, QConfigFix

_OTHER = {
    torch.quint8: torch.qint8,
    torch.qint8: torch.quint8,
    torch.uint8: torch.int8,
    torch.int8: torch.uint8,
    torch.float16: torch.bfloat16,
}
_ROLES = ("input", "output", "weight")


@dataclass(frozen=True)
class Edge:
    """``name``: what is asked beyond the claim, and of which tensor; ``widened`` admits it."""

    name: str
    role: str
    request: QConfigFix
    widened: DTypeConfig

    @property
    def of_small_scales(self) -> bool:
        """Whether it is seen only where values are so small that the scale is the least one asked for."""
        return "scale_min_lower_bound" in self.name


def edges_of(config: DTypeConfig, asked: QConfigFix) -> Iterator[Edge]:
    """What lies one step beyond ``config``; ``asked`` is what it admits.

    >>> from backquant.conformance.requests import asked_for
    >>> config = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> [edge.name for edge in edges_of(config, asked_for(config, None, None))]
    ['input dtype qint8', 'weight dtype quint8', 'at each call']
    """
    for role in _ROLES:
        demand: DTypeWithConstraints = getattr(config, f"{role}_dtype_with_constraints")
        if not is_quantized(demand.dtype):
            continue
        for field, value, fix in _beyond(demand, _observer(asked, role)):
            if role == "output" and not _its_own(config, field):
                continue
            name = f"{role} {field} {_text(value)}"
            yield Edge(name, role, _with(asked, role, fix), _widened(config, role, field, value))
    yield from _at_each_call(config, asked)


def _its_own(config: DTypeConfig, field: str) -> bool:
    """Whether a demand on outputs is another than that on inputs, so that it is seen by itself."""
    of_output, of_input = (
        getattr(config, f"{role}_dtype_with_constraints") for role in ("output", "input")
    )
    same: bool = getattr(of_output, field) == getattr(of_input, field)
    return of_output.dtype == of_input.dtype and not same


def _observer(asked: QConfigFix, role: str) -> ObserverFix:
    return asked.weight if role == "weight" else asked.activation


def _with(asked: QConfigFix, role: str, fix: ObserverFix) -> QConfigFix:
    return asked._replace(weight=fix) if role == "weight" else asked._replace(activation=fix)


def _text(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _beyond(
    demand: DTypeWithConstraints, fix: ObserverFix
) -> Iterator[tuple[str, Any, ObserverFix]]:
    """Each demand on a tensor, one step further, and the observer that asks for that."""
    values = dict(fix.values or {})
    other = _OTHER.get(demand.dtype) if demand.dtype is not None else None
    low, high = integer_range(demand.dtype) or (0, 0)
    if fix.name == "FixedQParamsObserver":
        scale = 2 * values["scale"]
        yield "scale_exact_match", scale, replace(fix, values={**values, "scale": scale})
    elif other is not None and "qscheme" not in str(values.get("granularity", "")):
        bare = {k: v for k, v in values.items() if k not in ("quant_min", "quant_max")}
        yield "dtype", other, replace(fix, values={**bare, "dtype": other})
    bound = demand.quant_min_lower_bound
    if bound is not None and bound > low:
        yield (
            "quant_min_lower_bound",
            bound - 1,
            replace(fix, values={**values, "quant_min": int(bound - 1)}),
        )
    bound = demand.quant_max_upper_bound
    if bound is not None and bound < high:
        yield (
            "quant_max_upper_bound",
            bound + 1,
            replace(fix, values={**values, "quant_max": int(bound + 1)}),
        )
    bound = demand.scale_min_lower_bound
    if bound is not None:
        yield "scale_min_lower_bound", bound / 2, replace(fix, values={**values, "eps": bound / 2})
    if demand.symmetric and fix.name == "MinMaxObserver":
        affine = {**values, "qscheme": torch.per_tensor_affine}
        yield "symmetric", False, replace(fix, values=affine)


def _widened(config: DTypeConfig, role: str, field: str, value: Any) -> DTypeConfig:
    """``config`` with ``value`` for one demand; of activations, for inputs and outputs."""
    made = config.to_dict()
    for tensor in (role,) if role == "weight" else ("input", "output"):
        demand: DTypeWithConstraints = getattr(config, f"{tensor}_dtype_with_constraints")
        if not is_quantized(demand.dtype):
            continue
        kept = demand.to_dict()
        if field == "dtype":  # bounds are those of the dtype
            kept = {}
        made[f"{tensor}_dtype"] = DTypeWithConstraints(**{**kept, field: value})
    return DTypeConfig.from_dict(made)


def _at_each_call(config: DTypeConfig, asked: QConfigFix) -> Iterator[Edge]:
    """Quantized at each call where the claim is for scales known ahead."""
    if config.is_dynamic or not is_quantized(config.input_dtype) or config.weight_dtype is None:
        return
    placeholder = ObserverFix(
        "PlaceholderObserver", {"dtype": config.input_dtype, "is_dynamic": True}
    )
    given = {**config.to_dict(), "is_dynamic": True, "output_dtype": torch.float}
    yield Edge(
        "at each call",
        "input",
        asked._replace(activation=placeholder),
        DTypeConfig.from_dict(given),
    )
