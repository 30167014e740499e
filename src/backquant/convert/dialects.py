"""The two spellings of "this value is quantized here" in a reference graph.

``decomposed``: ``torch.ops.quantized_decomposed.*`` on plain integer tensors, qparams as literals.
``quantized_tensor``: ``torch.quantize_per_tensor`` and ``.dequantize()``, qparams as buffers, as
PyTorch's ``convert_to_reference_fx`` writes them.

Each writer puts its nodes right before ``position`` and returns the dequantized value.

Narrower floats (float16, bfloat16) are casts there and back. In the decomposed dialect a static one is
``convert_element_type.no_fuse``, as in PyTorch: the rounding is asked for. A dynamic one is
``aten.to.dtype``: it says that the operator's kernel takes the narrower weight, and a kernel that takes
its input in float32 may leave the cast out. (PyTorch has no dynamic float16 in this dialect.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from backquant.dtypes import ObservedQParams, is_narrow_float, is_quantized, is_scaled_float, qdtype
from backquant.errors import ConfigError
from backquant.graph import (
    GraphEditor,
    call_before,
    register_quantized_decomposed,
)
from backquant.operators import overload

__all__ = [
    "DIALECTS",
    "Writer",
    "check_narrow_float",
    "is_dequantize",
    "without_uint16",
    "write_decomposed",
    "write_quantized_tensor",
]

_HALF = 1 << 15
_DYNAMIC_STORAGE = (torch.uint8, torch.int8)
# torch's engines for which its own conversion asks one bit less of inputs that are quantized at each call;
# only the dialect of torch's quantized tensors, which torch runs, reads this.
_REDUCED_ENGINES = ("fbgemm", "x86")


@dataclass(frozen=True)
class Writer:
    """What a dialect needs besides the qparams.

    ``buffer_prefix`` is the start of the names of buffers; ``engine`` the backend's, whose kernels
    decide about the range of dynamic quantization.
    """

    editor: GraphEditor
    position: fx.Node
    buffer_prefix: str = ""
    engine: str = ""

    def call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """A call of ``function`` before the position."""
        return call_before(self.position, "call_function", function, args)

    def method(self, name: str, *args: Any) -> fx.Node:
        """A call of a method before the position."""
        with self.editor.graph.inserting_before(self.position):
            return self.editor.graph.call_method(name, args)

    def buffer(self, key: str, tensor: torch.Tensor) -> fx.Node:
        """A new buffer, read before the position."""
        path = self.editor.names.take(f"{self.buffer_prefix}{key}")
        return self.editor.read_buffer(self.position, path, tensor)


def write_decomposed(writer: Writer, value: fx.Node, found: ObservedQParams) -> fx.Node:
    """``value`` quantized and dequantized on plain tensors; static, dynamic or a narrower float."""
    register_quantized_decomposed()
    ops = torch.ops.quantized_decomposed
    if is_narrow_float(found.dtype):
        may_be_left_out = found.is_dynamic
        cast = overload("to") if may_be_left_out else ops.convert_element_type.no_fuse
        return writer.call(cast, writer.call(cast, value, found.dtype), torch.float32)
    if found.is_dynamic:
        return _decomposed_dynamic(writer, value, found)
    if is_scaled_float(found.dtype):
        return _decomposed_float8(writer, value, found)
    if found.axis is None:
        qparams: tuple[Any, ...] = found.number.literals
        quantized = writer.call(ops.quantize_per_tensor.default, value, *qparams)
        return writer.call(ops.dequantize_per_tensor.default, quantized, *qparams)
    found = without_uint16(found)
    bounds = (found.quant_min, found.quant_max, found.storage)
    assert found.scale is not None and found.zero_point is not None
    scale = writer.buffer("_scale_", found.scale)
    zero_point = writer.buffer("_zero_point_", found.zero_point)
    qparams = (scale, zero_point, found.axis, *bounds)
    quantized = writer.call(ops.quantize_per_channel.default, value, *qparams)
    return writer.call(ops.dequantize_per_channel.default, quantized, *qparams)


def without_uint16(found: ObservedQParams) -> ObservedQParams:
    """The same numbers, 2**15 further down, in int16: ``dequantize_per_channel`` cannot subtract from uint16.

    >>> one = torch.ones(1)
    >>> found = ObservedQParams(one, one.int(), 0, 65535, torch.uint16, axis=0)
    >>> without_uint16(found).zero_point, without_uint16(found).quant_max
    (tensor([-32767], dtype=torch.int32), 32767)
    """
    if found.storage != torch.uint16 or found.zero_point is None:
        return found
    low, high = found.quant_min - _HALF, found.quant_max - _HALF
    shifted = found.zero_point - _HALF
    return replace(found, zero_point=shifted, quant_min=low, quant_max=high, dtype=torch.int16)


def _decomposed_float8(writer: Writer, value: fx.Node, found: ObservedQParams) -> fx.Node:
    check_narrow_float(found, value.name)
    ops, scale = torch.ops.backquant, found.number.scale
    # hardware with a smaller float8 range (up to 240): clamp to it
    if found.quant_max < qdtype(found.dtype).high:
        edges = found.quant_min * scale, found.quant_max * scale
        value = writer.call(overload("clamp"), value, *edges)
    quantized = writer.call(ops.quantize_float8.default, value, scale, found.dtype)
    return writer.call(ops.dequantize_float8.default, quantized, scale)


def check_narrow_float(found: ObservedQParams, value: str) -> None:
    """8-bit floats have one scale, no zero point and a range around 0; else ConfigError."""
    limit = qdtype(found.dtype).high
    if found.axis is not None or found.number.zero_point != 0:
        raise ConfigError(
            f"{found.dtype} is quantized to with one scale and the zero point 0",
            where=f"the observer of {value}",
            fix="MinMaxObserver.with_args(dtype=torch.float8_e4m3fn, "
            "qscheme=torch.per_tensor_symmetric)",
        )
    if found.quant_min != -found.quant_max or not 0 < found.quant_max <= limit:
        raise ConfigError(
            f"the range [{found.quant_min}, {found.quant_max}] is none of {found.dtype}",
            where=f"the observer of {value}",
            fix=f"quant_min={-limit}, quant_max={limit}",
        )


def _decomposed_dynamic(writer: Writer, value: fx.Node, found: ObservedQParams) -> fx.Node:
    ops = torch.ops.quantized_decomposed
    if found.per_token:
        return _per_token(writer, value, found)
    if found.groups is not None:
        return _in_blocks(writer, value, found)
    if found.storage not in _DYNAMIC_STORAGE:
        raise ConfigError(
            f"dynamic quantization to {found.dtype} has no operator in the decomposed dialect",
            where=f"the observer of {value.name}",
            fix='torch.quint8 or torch.qint8, or dialect="quantized_tensor"',
        )
    choose = {
        torch.per_tensor_affine: ops.choose_qparams.tensor,
        torch.per_tensor_symmetric: ops.choose_qparams_symmetric.tensor,
    }[found.qscheme or torch.per_tensor_affine]
    bounds = (found.quant_min, found.quant_max)
    chosen = writer.call(choose, value, *bounds, found.eps, found.storage)
    scale = writer.call(operator.getitem, chosen, 0)
    zero_point = writer.call(operator.getitem, chosen, 1)
    qparams = (scale, zero_point, *bounds, found.storage)
    quantized = writer.call(ops.quantize_per_tensor.tensor, value, *qparams)
    return writer.call(ops.dequantize_per_tensor.tensor, quantized, *qparams)


def _per_token(writer: Writer, value: fx.Node, found: ObservedQParams) -> fx.Node:
    """One scale and zero point for every slice along the last axis. The operators know the whole int8."""
    ops = torch.ops.quantized_decomposed
    bounds = (found.quant_min, found.quant_max)
    if found.storage != torch.int8 or bounds != (-128, 127):
        raise ConfigError(
            f"dynamic quantization per token is to int8 [-128, 127], not to {found.dtype} {list(bounds)}",
            where=f"the observer of {value.name}",
            fix="PlaceholderObserver.with_args(dtype=torch.qint8, is_dynamic=True, "
            'granularity="per_token")',
        )
    chosen = writer.call(ops.choose_qparams_per_token_asymmetric.default, value, torch.int8)
    scale = writer.call(operator.getitem, chosen, 0)
    zero_point = writer.call(operator.getitem, chosen, 1)
    qparams = (scale, zero_point, *bounds, torch.int8)
    quantized = writer.call(ops.quantize_per_token.default, value, *qparams)
    return writer.call(ops.dequantize_per_token.default, quantized, *qparams, torch.float32)


def _in_blocks(writer: Writer, value: fx.Node, found: ObservedQParams) -> fx.Node:
    """One scale for each group or block, around 0."""
    ops, bounds = torch.ops.backquant, (found.quant_min, found.quant_max)
    if found.quant_max <= 0 or found.quant_min > 0:
        raise ConfigError(
            f"groups that are quantized at each call lie around 0, and {found.dtype} "
            f"{list(bounds)} does not",
            where=f"the observer of {value.name}",
            fix="a signed dtype: float8_e4m3fn, float4_e2m1fn_x2, int8",
        )
    how = (str(found.groups), *bounds, found.eps, found.dtype, found.scale_dtype)
    made = writer.call(ops.quantize_blocks.default, value, *how)
    parts = [writer.call(operator.getitem, made, index) for index in range(3)]
    return writer.call(ops.dequantize_blocks.default, *parts)


def write_quantized_tensor(writer: Writer, value: fx.Node, found: ObservedQParams) -> fx.Node:
    """``value`` quantized to a quantized tensor and dequantized; static, dynamic or a narrower float.

    Raises ConfigError for a dtype of which PyTorch has no quantized tensors.
    """
    if is_quantized(found.dtype) and not qdtype(found.dtype).tensor_token:
        raise ConfigError(
            f"PyTorch has no quantized tensors of {found.dtype}",
            where=f"the observer of {value.name}",
            fix='dialect="decomposed", which backquant.quantize uses',
        )
    if found.is_dynamic and found.dtype != torch.bfloat16:
        reduced = writer.engine in _REDUCED_ENGINES
        quantized = writer.call(torch.quantize_per_tensor_dynamic, value, found.dtype, reduced)
    elif is_narrow_float(found.dtype):
        quantized = writer.method("to", value, found.dtype)
    elif found.axis is None:
        device = found.scale.device if found.scale is not None else None
        scale = writer.buffer("_scale_", torch.tensor(found.number.scale, device=device))
        zero_point = writer.buffer(
            "_zero_point_", torch.tensor(found.number.zero_point, device=device)
        )
        quantized = writer.call(torch.quantize_per_tensor, value, scale, zero_point, found.dtype)
    else:
        assert found.scale is not None and found.zero_point is not None
        scale = writer.buffer("_scale_", found.scale)
        zero_point = writer.buffer("_zero_point_", found.zero_point)
        quantized = writer.call(
            torch.quantize_per_channel, value, scale, zero_point, found.axis, found.dtype
        )
    return writer.method("dequantize", quantized)


def is_dequantize(node: object) -> bool:
    """Whether a node dequantizes, in either dialect.

    >>> graph = fx.Graph()
    >>> is_dequantize(graph.call_method("dequantize", (graph.placeholder("q"),)))
    True
    """
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return node.target == "dequantize"
    return node.op == "call_function" and str(node.target).startswith(
        ("quantized_decomposed.dequantize_per_", "backquant.dequantize_")
    )


DIALECTS: dict[str, Callable[[Writer, fx.Node, ObservedQParams], fx.Node]] = {
    "decomposed": write_decomposed,
    "quantized_tensor": write_quantized_tensor,
}
