"""Attention and products of two activations in bfloat16, with one cast before and one behind.

What lies beside them (layer norms, softmax, additions) is generated code that computes in float32 registers;
these are calls, which bfloat16 may make faster. Only where the caller asks for it and the CPU has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from backquant.errors import EngineError, UsageError
from backquant.lower.kernels import attention, matrix
from backquant.operators import named
from backquant.runtime.compiled.functions import as_integer, rounded

_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def check_float_dtype(dtype: torch.dtype) -> None:
    """Raise ``UsageError`` for what is neither float32 nor bfloat16, ``EngineError`` for bfloat16 on a CPU
    without instructions for it.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise UsageError(
            f"float islands are computed in float32 or bfloat16, not in {dtype}",
            where="QuantizedModel.compile: float_dtype",
            fix="quantized.compile(float_dtype=torch.bfloat16)",
        )
    capabilities = torch.cpu.get_capabilities()
    if dtype == torch.bfloat16 and not any(capabilities.get(name) for name in _INSTRUCTIONS):
        raise EngineError(
            "this CPU has no instructions for bfloat16, which would be slower than float32",
            where=f"QuantizedModel.compile: float_dtype; it has none of {', '.join(_INSTRUCTIONS)}",
            fix="quantized.compile()   # float32",
        )


def _narrow(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.bfloat16() if floats else value


def _in_bfloat16(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def spelled(*args: Any, **kwargs: Any) -> torch.Tensor:
        named = {name: _narrow(value) for name, value in kwargs.items()}
        found: torch.Tensor = function(*(_narrow(value) for value in args), **named).float()
        return found

    return spelled


def _matmul(
    x: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    y: torch.Tensor,
    y_scale: float,
    y_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    """Integers less their zero points are bfloat16 exactly, and are summed in float32."""
    left, right = (x.float() - x_zero_point).bfloat16(), (y.float() - y_zero_point).bfloat16()
    value = torch.matmul(left, right).float() * (x_scale * y_scale)
    return as_integer(value, out_scale, out_zero_point, x.dtype)


_product = _in_bfloat16(torch.matmul)
_attention = _in_bfloat16(F.scaled_dot_product_attention)


def _attended(*args: Any) -> torch.Tensor:
    return attention.products(*args, rounded=rounded, product=_product)


def _attended_whole(*args: Any) -> torch.Tensor:
    return attention.whole(*args, rounded=rounded, attend=_attention)


NARROW: dict[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(named("scaled_dot_product_attention").spellings, _attention),
    attention.attended: _attended,
    attention.attended_whole: _attended_whole,
    torch.matmul: _product,
    torch.bmm: _in_bfloat16(torch.bmm),
    matrix.matmul: _matmul,
}
