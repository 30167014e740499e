"""What ONNX Runtime's CPU provider computes wrong or in float, and what is written instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backquant.deploy.job import ExportJob
from backquant.deploy.onnx.exporter import ORIGIN
from backquant.deploy.onnx.gemm import quantized_by
from backquant.deploy.onnx.rewrite import (
    OnnxCalls,
    Rule,
    array_of,
    comes_from,
    input_of,
    inputs_of,
    is_blocked,
    readers_of,
    rewrite,
)
from backquant.operators import overload

if TYPE_CHECKING:
    import onnx_ir as ir

# The scale and zero point of QuantizeLinear and DequantizeLinear nodes.


def has_one_scale(node: ir.Node) -> bool:
    """Whether scale and zero point are constants, one of each."""
    constants = [value.const_value for value in inputs_of(node)[1:]]
    return len(constants) == 2 and all(c is not None and c.size == 1 for c in constants)


def same_grid(one: Any, other: Any) -> bool:
    """Whether two nodes have the same ones: what one dequantizes and the other quantizes is as it was."""
    pairs = zip(one.inputs[1:], other.inputs[1:], strict=False)
    constants = [tuple(None if v is None else v.const_value for v in pair) for pair in pairs]
    return len(constants) == 2 and all(
        a is not None and b is not None and np.array_equal(a.numpy(), b.numpy())
        for a, b in constants
    )


# What clips values before a QuantizeLinear, clips the integers behind it instead.
#
# ONNX Runtime runs a product on integers where a QuantizeLinear reads it. A Relu or Clip between the two it
# takes away only where it knows that the quantization does the same: not behind a reshape, and not where the
# quantized range is wider than the bounds (6.03 over the 6 of a ReLU6); the product then runs in float.
# Rounding keeps the order of values, so that clipping to what the bounds become as integers, after the
# quantization, gives the same integers; where these are the ends of the integer type nothing is left to clip.
# Between a dequantize and a quantize node of one grid the integers themselves are clipped: ONNX Runtime
# has no Relu of integers.
_INFINITY = float("inf")


def _clip_behind(node: ir.Node) -> Any:
    if not has_one_scale(node):
        return None
    source, *bounds = _unclipped(node.inputs[0])
    if source is node.inputs[0] or source.producer() is None:
        return None
    scale, zero = map(array_of, node.inputs[1:])
    ends = np.iinfo(zero.dtype)
    steps = np.rint(np.array(bounds, np.float32) / scale.astype(np.float32).reshape(()))
    limits = np.clip(steps + int(zero.reshape(())), ends.min, ends.max).astype(zero.dtype)
    write, integers = OnnxCalls(node), source
    dequantize = comes_from(source, "DequantizeLinear")
    if dequantize is not None:
        if not same_grid(dequantize, node):
            return None
        integers = dequantize.inputs[0]
    elif limits.tolist() == [ends.min, ends.max]:
        node.replace_input_with(0, source)
        return None
    else:
        integers = write.again(source, *node.inputs[1:])
    return write.Clip(integers, *map(write.constant, limits))


def _unclipped(value: Any) -> tuple[Any, float, float]:
    """What is clipped before ``value``, by nodes that nothing else reads, and the bounds of all together."""
    low, high = -_INFINITY, _INFINITY
    while (bounds := _bounds(value)) is not None:
        low, high = max(low, bounds[0]), min(high, max(low, bounds[1]))
        value = value.producer().inputs[0]
    return value, low, high


def _bounds(value: Any) -> tuple[float, float] | None:
    node = value.producer()
    if node is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    if node.op_type == "Relu":
        return 0.0, _INFINITY
    if node.op_type != "Clip":
        return None
    given = [input_of(node, place) for place in (1, 2)]
    if any(bound is not None and bound.const_value is None for bound in given):
        return None
    low, high = map(array_of, given)
    return -_INFINITY if low is None else float(low), _INFINITY if high is None else float(high)


# What clips the floats of a product on integers, written as ``Max`` and ``Min``.
#
# ONNX Runtime looks through a Relu or Clip behind a product for the QuantizeLinear, and where none
# follows (the logarithm of a mel spectrogram) it leaves the product in float, though it has a kernel on
# integers that gives floats. Through Max and Min it does not look, and they give the same values.
_PRODUCTS = frozenset({"MatMul", "Gemm"})


def _as_bounds(node: ir.Node) -> Any:
    value, write = input_of(node, 0), OnnxCalls(node)
    product = value.producer()
    if product is None or product.op_type not in _PRODUCTS:
        return None
    if not all(comes_from(each, "DequantizeLinear") for each in product.inputs[:2]):
        return None
    if all(reader.op_type == "QuantizeLinear" for reader in readers_of(node)):
        return None
    low, high = input_of(node, 1), input_of(node, 2)
    if node.op_type == "Relu":
        low = write.constant(np.zeros((), value.dtype.numpy()))
    for kind, bound in (("Max", low), ("Min", high)):
        value = value if bound is None else write.call(kind, value, bound)
    return value


# Outputs that are quantized for a reader inside of the model stay what they are.
#
# ONNX Runtime moves a QuantizeLinear before what only moves values (a Transpose of the keys, before the
# product of attention), and puts a DequantizeLinear behind it. Where the value that it comes to is an
# output of the model, too, the output becomes the dequantized one, rounded and clipped (1.31: it counts
# readers inside of the model only). So the file has the pair there, beside the output.
_MOVING = frozenset({"Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def _round_behind_output(node: ir.Node) -> None:
    reader = _first_after_output(node) if has_one_scale(node) else None
    if reader is not None:
        value, write = reader.inputs[0], OnnxCalls(reader)
        rounded = write.QuantizeLinear(value, *node.inputs[1:])
        back = write.DequantizeLinear(rounded, *node.inputs[1:])
        rounded.shape = back.shape = value.shape
        reader.replace_input_with(0, back)


def _first_after_output(quantize: Any) -> Any:
    """The node that reads an output of the model, at the other end of nodes that only move values, and that
    nothing but ``quantize``, and quantizations alike, reads."""
    value = quantize.inputs[0]
    if not all(
        user.op_type == "QuantizeLinear" and has_one_scale(user) and same_grid(quantize, user)
        for user, _ in value.uses()
    ):
        return None
    while True:
        node = value.producer()
        if node is None or node.op_type not in _MOVING or value.is_graph_output():
            return None
        value = node.inputs[0]
        if len(value.uses()) > 1:
            return None
        if value.is_graph_output():
            return node


# Bicubic resizing to a known size, as one product with a matrix along the columns and one along the rows.
#
# ONNX Runtime (1.31) computes a bicubic ``Resize`` value by value: of CrossViT, which resizes its input, two
# thirds of the time. The matrices are what PyTorch's operator makes of unit ones.
_SIZES = 3  # the input
_MOST = 4096  # rows and columns: beyond, the products are more work than they save
_MODES = {"half_pixel": False, "align_corners": True}
_CUBIC = -0.75


def _is_bicubic(node: ir.Node) -> bool:
    named = {name: each.value for name, each in node.attributes.items()}
    if named.get("mode") != "cubic" or named.get("cubic_coeff_a", _CUBIC) != _CUBIC:
        return False
    if named.get("coordinate_transformation_mode", "half_pixel") not in _MODES or "axes" in named:
        return False
    return not named.get("antialias") and not named.get("exclude_outside")


def _as_products(node: ir.Node) -> Any:
    import onnx_ir as ir

    source, *rest = inputs_of(node)
    shape, sizes = source.shape, array_of(input_of(node, _SIZES))
    if not _is_bicubic(node) or sizes is None or any(each is not None for each in rest[:2]):
        return None
    if shape is None or len(shape) != 4 or not all(isinstance(size, int) for size in shape):
        return None
    old, new = [int(size) for size in shape], sizes.tolist()
    if old[:2] != new[:2] or sum(old[2:]) > _MOST or source.dtype != ir.DataType.FLOAT:
        return None
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    write, corners = OnnxCalls(node), _MODES[str(mode)]
    columns = write.MatMul(source, write.constant(_matrix(old[3], new[3], corners).T))
    columns.shape = ir.Shape([*old[:3], new[3]])
    return write.MatMul(write.constant(_matrix(old[2], new[2], corners)), columns)


def _matrix(old: int, new: int, corners: bool) -> np.ndarray[Any, Any]:
    """What makes ``new`` values of ``old`` ones: ``[new, old]``.

    >>> _matrix(2, 2, corners=False).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    made = overload("upsample_bicubic2d")(torch.eye(old)[None, None], [new, old], corners)
    matrix: np.ndarray[Any, Any] = made[0, 0].numpy()
    return matrix


# Weights in groups as ONNX Runtime's own operators, which name the precision of the activations.
#
# A ``DequantizeLinear`` with ``block_size`` before a ``MatMul`` is fused to ``MatMulNBits`` when a session is
# made, with activations rounded to 8 bits unless the session is told otherwise. Here the file itself says
# what the description does: 1 float32 (``accuracy_level``). A table that a ``Gather`` reads is
# ``GatherBlockQuantized``: only the rows that are read become floats.
#
# Source: ONNX Runtime's documentation of contrib operators (``com.microsoft``), MatMulNBits and
# GatherBlockQuantized.

_DOMAIN = "com.microsoft"
_FLOAT32 = 1  # accuracy_level


def _is_of_4_bits(dequantize: Any, axis: int) -> bool:
    if not is_blocked(dequantize):
        return False
    weight = dequantize.inputs[0].const_value
    own = dequantize.attributes["axis"].as_int() % len(weight.shape)
    return weight.dtype.name in ("INT4", "UINT4") and len(weight.shape) == 2 and own == axis


def _parts(dequantize: Any) -> tuple[Any, Any, Any, int]:
    """Unsigned values, scales, zero points (None: 8 for all) and the group size."""
    more = 8 if dequantize.inputs[0].const_value.dtype.name == "INT4" else 0
    weight, scale, *zero_point = map(array_of, dequantize.inputs)
    values, zero = (weight.astype(np.int8) + more).astype(np.uint8), None
    if zero_point:
        zero = zero_point[0].astype(np.int8) + more
    elif not more:
        zero = np.zeros(scale.shape, np.int8)
    return values, scale, zero, dequantize.attributes["block_size"].as_int()


def _packed(values: Any) -> Any:
    """Two to a byte along the last axis, the first in the lower half."""
    values = values.astype(np.uint8)
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], -1)
    return np.ascontiguousarray(values[..., 0::2] | (values[..., 1::2] << 4))


def _product(node: ir.Node) -> Any:
    x, weight = inputs_of(node)
    dequantize, write = weight.producer(), OnnxCalls(node)
    if not _is_of_4_bits(dequantize, axis=0):
        return None
    values, scale, zero_point, size = _parts(dequantize)
    inner, outer = values.shape
    name = str(dequantize.inputs[0].name)
    held = [
        write.constant(_packed(values.T.reshape(outer, inner // size, size)), name),
        write.constant(scale.T, f"{name}_scale"),
    ]
    if zero_point is not None:
        held.append(write.constant(_packed(zero_point.T), f"{name}_zero_point"))
    numbers = {"K": inner, "N": outer, "bits": 4, "block_size": size, "accuracy_level": _FLOAT32}
    return write.call("MatMulNBits", x, *held, domain=_DOMAIN, **numbers)


def _look_up(node: ir.Node) -> Any:
    table, rows = inputs_of(node)
    dequantize = table.producer()
    if not _is_of_4_bits(dequantize, axis=1):
        return None
    weight, *qparams = dequantize.inputs
    size = dequantize.attributes["block_size"].as_int()
    numbers = {"gather_axis": 0, "quantize_axis": 1, "block_size": size}
    return OnnxCalls(node).call(
        "GatherBlockQuantized", weight, rows, *qparams, domain=_DOMAIN, **numbers
    )


# ``nn.LSTM`` on integers: the float ``LSTM`` of the file becomes ``DynamicQuantizeLSTM``.
#
# The exporter writes the weights as Unsqueeze and Concat of Slices of ``DequantizeLinear(constant)``, in the
# order of ONNX (gates i, o, f, c) and for all directions. The same moves are made here with the integers and
# their scales. The operator quantizes what it reads itself, at each call the sequence and at each step the
# hidden state, so that it is given the floats in front of the quantize nodes.
#
# Source: ONNX Runtime's documentation of contrib operators (``com.microsoft``), DynamicQuantizeLSTM.

_NAME = "DynamicQuantizeLSTM"
_LAYOUT = ("Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")

# of LSTM's attributes those that the operator has, too
_ATTRIBUTES = ("activation_alpha", "activation_beta", "activations", "clip", "direction")
_NUMBERS = ("hidden_size", "input_forget")
_STATES = 8  # inputs up to the peepholes; behind them stand scales and zero points


@dataclass(frozen=True)
class _Weight:
    """Symmetric integers, and scales of the same shape but for a last axis of 1."""

    integers: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any]


def apply_workarounds(model: Any, job: ExportJob) -> None:
    """Apply all of them, in place; of LSTMs to those that the plan quantizes at each call."""
    names = {name for operator in job.expected if operator.is_dynamic for name in operator.nodes}

    def lstm(node: ir.Node) -> Any:
        return _on_integers(node) if node.metadata_props.get(ORIGIN) in names else None

    last: list[dict[str, Rule]] = [{"LSTM": lstm}, {"Resize": _as_products}]
    for rules in (*TABLES, *last):
        rewrite(model, rules)


def _weight(value: Any) -> _Weight | None:
    """The constant that ``value`` is made of by moves of rows; ``None`` where it is none."""
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "DequantizeLinear":
        return _constant(node)
    if node.op_type == "Concat" and node.attributes["axis"].as_int() == 0:
        parts = [_weight(part) for part in node.inputs]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        joined = (np.concatenate([getattr(p, n) for p in found]) for n in ("integers", "scale"))
        return _Weight(*joined)
    numbers = list(map(array_of, node.inputs[1:]))
    if node.op_type not in ("Slice", "Unsqueeze") or any(number is None for number in numbers):
        return None
    of = _weight(node.inputs[0])
    moves = [number.tolist() for number in numbers]
    if of is None or not (moves == [[0]] if node.op_type == "Unsqueeze" else _of_rows(moves)):
        return None
    if node.op_type == "Unsqueeze":
        return _Weight(of.integers[None], of.scale[None])
    rows = slice(moves[0][0], moves[1][0])
    return _Weight(of.integers[rows], of.scale[rows])


def _of_rows(moves: list[list[int]]) -> bool:
    """Whether starts, ends, axes and steps are a slice of the first axis, row by row."""
    starts, ends, axes, steps = (*moves, *([0], [1])[len(moves) - 2 :])
    return len(starts) == len(ends) == 1 and axes == [0] and steps == [1]


def _constant(node: ir.Node) -> _Weight | None:
    constants = list(map(array_of, node.inputs))
    if any(constant is None for constant in constants):
        return None
    integers, scale, *zero_points = constants
    if integers.dtype != np.int8 or integers.ndim != 2 or any(zero.any() for zero in zero_points):
        return None
    if scale.ndim == 1 and scale.size > 1 and node.attributes["axis"].as_int() % 2 != 0:
        return None
    rows = np.broadcast_to(scale.reshape(-1, 1), (len(integers), 1))
    return _Weight(integers, rows.astype(np.float32))


def _on_integers(node: ir.Node) -> Any:
    weights = [_weight(node.inputs[place]) for place in (1, 2)]
    if None in weights:
        return None
    _read_floats(node)
    write = OnnxCalls(node)
    inputs = [*node.inputs, *[None] * _STATES][:_STATES]
    for place, weight in enumerate(weights, 1):
        assert weight is not None
        name, scale = f"{node.name}/weight_{place}", weight.scale[..., 0]
        inputs[place] = write.constant(weight.integers.transpose(0, 2, 1), name)
        zeros = np.zeros(scale.shape, np.int8)
        inputs += [write.constant(scale, f"{name}_scale"), write.constant(zeros, f"{name}_zero")]
    kept = {n: a for n, a in node.attributes.items() if n in (*_ATTRIBUTES, *_NUMBERS)}
    return write.call(_NAME, *inputs, domain=_DOMAIN, outputs=len(node.outputs), **kept)


def _read_floats(node: ir.Node) -> None:
    """What the node reads is no longer quantized in front of it, where it was at each call.

    Nodes that change the layout may stand between, if nothing else reads what they give.
    """
    reader = node
    value = input_of(node, 0)
    while quantized_by(value) is None:
        above = value.producer()
        alone = len(value.uses()) == 1 and not value.is_graph_output()
        if above is None or above.op_type not in _LAYOUT or not alone:
            return
        reader, value = above, above.inputs[0]
    reader.replace_input_with(0, quantized_by(value).inputs[0])


#: The rules, one table after the other: what one writes another reads.
TABLES: tuple[dict[str, Rule], ...] = (
    {"QuantizeLinear": _clip_behind},
    {"Relu": _as_bounds, "Clip": _as_bounds},
    {"QuantizeLinear": _round_behind_output},
    {"MatMul": _product, "Gather": _look_up},
)
