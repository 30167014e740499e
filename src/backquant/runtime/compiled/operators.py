"""The integer operators of a model that is to be compiled: functional, on plain tensors.

``backquant::convolution`` and ``backquant::linear`` say everything that a kernel of oneDNN or of ours has to
know, the addition of another tensor included; unlike oneDNN's own they overwrite nothing.
``backquant::image`` quantizes float images ``[n, 3, h, w]`` and lays the channels of a pixel side by side.
A compiler replaces them (``lowerings``); called as they are they run on oneDNN, and pack weights each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from backquant.errors import EngineError, UsageError
from backquant.lower.kernels import attention, matrix
from backquant.lower.kernels.boundary import dequantize, quantize
from backquant.lower.kernels.zero_point import (
    fold_zero_point,
    pad_with,
    plan_padding,
    rounds_within,
)
from backquant.operators import named
from backquant.runtime.compiled.functions import as_integer, rounded

LIBRARY = torch.library.Library("backquant", "FRAGMENT")
_SOURCE = (
    "Tensor x, float x_scale, int x_zero_point, Tensor weight, Tensor weight_scale, Tensor? bias"
)
_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups"
_OTHER = "Tensor? other, float other_scale, int other_zero_point"
_RESULT = (
    "float out_scale, int out_zero_point, ScalarType out_dtype, "
    "str post_op, float[] post_numbers, str post_algorithm"
)
LIBRARY.define(f"convolution({_SOURCE}, {_GEOMETRY}, {_OTHER}, {_RESULT}) -> Tensor")
LIBRARY.define(f"linear({_SOURCE}, {_RESULT}) -> Tensor")

convolution = torch.ops.backquant.convolution.default
linear = torch.ops.backquant.linear.default

_PLAIN: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")


def output_size(size: Sequence[Any], kernel: Sequence[int], geometry: Sequence[Any]) -> list[Any]:
    """The spatial size of a convolution's result.

    ``geometry``: stride, padding, dilation, groups.

    >>> output_size([8, 9], [3, 3], ([2, 2], [1, 1], [1, 1], 1))
    [4, 5]
    """
    places = zip(size, kernel, geometry[0], geometry[1], geometry[2], strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in places]


def _flat(column: torch.Tensor | None) -> Any:
    return None if column is None else column.reshape(-1)


_Source = tuple[torch.Tensor, torch.Tensor, float, int]


def _is_precise(source: _Source, result: Sequence[Any]) -> bool:
    """Whether the bias may make up for the zero point: ``rounds_within``."""
    return bool(result[2].itemsize > 1) or rounds_within(*source, result[0])


def _convolution(x: torch.Tensor, scale: float, zero_point: int, *rest: Any) -> torch.Tensor:
    weight, weight_scale, bias, *geometry = rest[:7]
    weight_scale, bias = _flat(weight_scale), _flat(bias)
    other, other_scale, other_zero_point, *result = rest[7:]
    depthwise = geometry[3] > 1 and weight.shape[1] == 1
    is_precise = _is_precise((weight, weight_scale, scale, zero_point), result)
    padding = plan_padding(tuple(geometry[1]), zero_point, depthwise or not is_precise)
    if padding.before is not None:
        x = pad_with(x, padding.before, zero_point)
    shape = [1, weight.shape[1] * geometry[3], *x.shape[2:]]
    geometry[1] = padding.inside
    bias = fold_zero_point(weight, weight_scale, bias, scale, padding.folded)
    packed = torch.ops.onednn.qconv_prepack(
        weight, weight_scale, scale, padding.zero_point, *geometry, shape
    )
    zeros = torch.zeros(weight_scale.numel(), dtype=torch.int64)
    source = (x, scale, padding.zero_point, packed, weight_scale, zeros, bias, *geometry)
    run: Callable[..., torch.Tensor] = torch.ops.onednn.qconv_pointwise.default
    if other is None:
        return run(*source, *result)
    out_scale, out_zero_point, dtype, post_op = result[:4]
    total = run(*source, *_PLAIN) + dequantize(
        other, other_scale, other_zero_point, 0, 255, other.dtype
    )
    if post_op == "relu":
        total = total.relu()
    return quantize(total, out_scale, out_zero_point, 0, 255, dtype)


def _linear(x: torch.Tensor, scale: float, zero_point: int, *rest: Any) -> torch.Tensor:
    weight, weight_scale, bias, *result = rest
    weight_scale, bias = _flat(weight_scale), _flat(bias)
    packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    told = 0 if _is_precise((weight, weight_scale, scale, zero_point), result) else zero_point
    bias = fold_zero_point(weight, weight_scale, bias, scale, zero_point - told)
    zeros = torch.zeros(weight_scale.numel(), dtype=torch.int64)
    run: Callable[..., torch.Tensor] = torch.ops.onednn.qlinear_pointwise.default
    return run(x, scale, told, packed, weight_scale, zeros, bias, *result)


def _convolution_shape(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    weight, geometry, dtype = rest[2], rest[5:9], rest[14]
    spatial = output_size(x.shape[2:], weight.shape[2:], geometry)
    made = x.new_empty((x.shape[0], weight.shape[0], *spatial), dtype=dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return made.to(memory_format=formats.get(x.dim(), torch.contiguous_format))


def _linear_shape(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rest[2].shape[0]), dtype=rest[7])


for _name, _run, _shape in (
    ("convolution", _convolution, _convolution_shape),
    ("linear", _linear, _linear_shape),
):
    LIBRARY.impl(_name, _run, "CPU")
    torch.library.register_fake(f"backquant::{_name}", _shape, lib=LIBRARY)


# Attention and products of two activations in bfloat16, with one cast before and one behind.
#
# What lies beside them (layer norms, softmax, additions) is generated code that computes in float32
# registers; these are calls, which bfloat16 may make faster. Only where the caller asks for it and the
# CPU has it.

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
