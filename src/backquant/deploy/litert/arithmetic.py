"""Operators of one and of two values at each place, and comparisons.

1. Operands of two layouts are brought to that of the first which is not PyTorch's own; sizes are
   broadcast from the last axis on.
2. What LiteRT has no operator for is composed: SiLU is x × sigmoid(x), hard-sigmoid is relu6(x + 3) / 6.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from backquant.deploy.edits import arguments
from backquant.deploy.litert.emitter import (
    Call,
    Constant,
    Emitter,
    Layout,
    Table,
    UnsupportedError,
    Value,
    activation,
    always,
    plain,
)
from backquant.deploy.litert.network import LIMITS, Scales, Tensor
from backquant.operators import overload

TABLE = Table()

# Clamps after an operator: what its kernel does itself, and what is written after it.

CLAMPS = (overload("relu"), overload("relu6"), overload("hardtanh"), overload("clamp"))

#: The clamps that kernels have.
_CODES = {(0.0, math.inf): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}


def is_clamp(node: fx.Node) -> bool:
    """Whether ``node`` cuts its only operand off at two numbers."""
    if node.op != "call_function" or node.target not in CLAMPS:
        return False
    return not any(isinstance(each, fx.Node) for each in node.args[1:])


def bounds(node: fx.Node) -> tuple[float, float]:
    """The numbers that a clamp cuts off at; infinite where it does not."""
    if node.target is overload("relu"):
        return 0.0, math.inf
    if node.target is overload("relu6"):
        return 0.0, 6.0
    given = arguments(node)
    low = given.get("min_val", given.get("min"))
    high = given.get("max_val", given.get("max"))
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def fused_clamp(node: fx.Node, scales: Scales | None, dtype: str = "INT8") -> str | None:
    """The clamp of a kernel that does the same as ``node``; none is needed where the integers end there
    anyway."""
    ends = bounds(node)
    if scales is not None and effective(*ends, scales, LIMITS[dtype]) == (-math.inf, math.inf):
        return "NONE"
    return _CODES.get(ends)


def effective(
    low: float, high: float, scales: Scales, limits: tuple[int, int]
) -> tuple[float, float]:
    """``low`` and ``high``, infinite where no integer lies beyond.

    >>> effective(0.0, 6.0, Scales.one(0.02, -128), (-128, 127))
    (-inf, inf)
    """
    [scale], [zero_point] = scales.scale, scales.zero_point
    first, last = (limit - zero_point for limit in limits)
    if low <= first * scale:
        low = -math.inf
    if round(high / scale) >= last if math.isfinite(high) else True:
        high = math.inf
    return low, high


def clamp_after(emitter: Emitter, node: fx.Node, value: Value) -> Value:
    """``node`` of a value, in the qparams of that."""
    tensor = value.tensor
    low, high = bounds(node)
    code = _CODES.get((low, high))
    if tensor.scales is not None:
        low, high = effective(low, high, tensor.scales, LIMITS[tensor.dtype])
    if (low, high) == (-math.inf, math.inf):
        return value
    if code is not None:
        return Value(emitter.same(code, tensor), value.layout, value.columns)
    for name, bound in (("MAXIMUM", low), ("MINIMUM", high)):
        if math.isfinite(bound):
            number = Constant("bound", torch.tensor([bound]))
            dtype = tensor.dtype if tensor.scales is not None else ""
            other = emitter.constant(number, tensor.scales, dtype).tensor
            tensor = emitter.same(name, tensor, other)
    return Value(tensor, value.layout, value.columns)


UNIT = {"INT8": Scales.one(1 / 256, -128), "INT16": Scales.one(1 / 32768, 0)}
AROUND_ZERO = {"INT8": Scales.one(1 / 128, 0), "INT16": Scales.one(1 / 32768, 0)}
_SIX = {"INT8": Scales.one(6 / 255, -128), "INT16": Scales.one(6 / 32767, 0)}
_NARROW_RANK = 5  # of kernels that broadcast integers


def in_steps(scales: dict[str, Scales], call: Call) -> bool:
    """Whether the result has the qparams that a kernel gives."""
    return call.scales == scales.get(call.dtype)


def _int8(call: Call) -> bool:
    return call.dtype == "INT8"


def _few_axes(call: Call) -> bool:
    return len(call.shape) <= _NARROW_RANK and call.arg("alpha", 1) == 1


def common(call: Call, values: list[Value]) -> tuple[list[Tensor], Layout]:
    """Rule 1."""
    rank = len(call.shape)
    full = [v for v in values if len(v.shape) == rank and v.tensor.data is None]
    full = full or [v for v in values if len(v.shape) == rank]
    layout = next((v.layout for v in full if v.layout != plain(rank)), plain(rank))
    return [_aligned(call, value, layout) for value in values], layout


def _aligned(call: Call, value: Value, layout: Layout) -> Tensor:
    rank, own = len(layout), len(value.shape)
    if own == 0:
        return value.tensor  # one number
    if own < rank and layout == plain(rank):
        return call.emitter.laid(value, plain(own))
    return call.emitter.laid(call.emitter.widened(value, rank), layout)


def _together(code: str, call: Call, values: list[Value], **options: Any) -> Value:
    tensors, layout = common(call, values)
    if len({tensor.dtype for tensor in tensors[code == "SELECT_V2" :]}) > 1:
        raise UnsupportedError("operands of two types")
    return call.emit(code, tensors, layout, **options)


def _of_two(code: str, call: Call, *names: str) -> Value:
    """``names``: of the operands, where they are not the usual ones."""
    return _together(code, call, [call.read(name) for name in names or ("self", "other")])


def _binary(code: str, call: Call, *names: str) -> Value:
    """Of kernels that clamp. ``names``: as of ``_of_two``."""
    alpha = call.arg("alpha", 1)
    values = [call.read(name) for name in names or ("self", "other")]
    if alpha != 1:
        if call.integer:
            raise UnsupportedError("an addition with alpha on integers")
        number = call.emitter.number(float(alpha), name="alpha")
        scaled = call.emitter.same("MUL", values[1].tensor, number)
        values[1] = Value(scaled, values[1].layout)
    return _together(code, call, values, fusedActivationFunction=activation(call))


def _by_a_constant(call: Call) -> bool:
    other = call.constant("other")
    plain_quotient = call.args.get("rounding_mode") is None
    return other is not None and bool((other.value != 0).all()) and plain_quotient


@TABLE.rule("div.Tensor div.Scalar", _by_a_constant, fuses=True)
def _divided(call: Call) -> Value:
    """Integers are divided by a constant: multiplied by its inverse."""
    if not call.integer:
        if call.arg("rounding_mode") is not None:
            raise UnsupportedError("a division that rounds")
        return _binary("DIV", call)
    other = call.constant("other")
    assert other is not None
    inverse = Constant(f"{other.name}_inverse", 1.0 / other.value.float())
    values = [call.read("self"), call.emitter.constant(inverse, None, call.dtype)]
    return _together("MUL", call, values, fusedActivationFunction=activation(call))


def _selected(code: str, call: Call) -> Value:
    """Maximum and minimum: both operands in the steps of the result."""
    return _together(code, call, [call.read(name, call.scales) for name in ("self", "other")])


def _unary(code: str, call: Call, **options: Any) -> Value:
    value = call.source
    made = call.emit(code, (value.tensor,), value.layout, **options)
    made.columns = value.columns
    return made


@TABLE.rule("gelu", _int8)
def _gelu(call: Call) -> Value:
    return _unary("GELU", call, approximate=call.arg("approximate", "none") == "tanh")


@TABLE.rule("leaky_relu", always)
def _leaky_relu(call: Call) -> Value:
    return _unary("LEAKY_RELU", call, alpha=float(call.arg("negative_slope", 0.01)))


def _is_plain_elu(call: Call) -> bool:
    return all(call.arg(name, 1) == 1 for name in ("alpha", "scale", "input_scale"))


@TABLE.rule("elu", lambda call: _int8(call) and _is_plain_elu(call))
def _elu(call: Call) -> Value:
    if not _is_plain_elu(call):
        raise UnsupportedError("ELU with another slope than 1")
    return _unary("ELU", call)


@TABLE.rule("prelu", _int8)
def _prelu(call: Call) -> Value:
    value = call.read("self")
    rank = len(value.shape)
    slopes = call.constant("weight")
    if slopes is None:
        raise UnsupportedError("slopes that are computed")
    count = slopes.value.numel()
    shape = (1, count, *(1,) * (rank - 2)) if rank > 1 else (count,)
    wide = Constant(slopes.name, slopes.value.reshape(shape).expand(shape))
    alpha = call.emitter.constant(wide, None, call.dtype if call.integer else "")
    tensor = call.emitter.laid(alpha, value.layout)
    without_batch = call.emitter.reshape(tensor, tensor.shape[1:])
    return call.emit("PRELU", (value.tensor, without_batch), value.layout)


@TABLE.rule("relu relu6 hardtanh clamp", always, keeps=True)
def _clamp(call: Call) -> Value:
    return clamp_after(call.emitter, call.node, call.source)


@TABLE.moves("clone contiguous detach alias lift_fresh_copy dropout")
def _copied(call: Call) -> Value:
    return call.source


@TABLE.rule("silu", always)
def _silu(call: Call) -> Value:
    """Rule 2."""
    value = call.read("self")
    made = call.emitter.like(value.tensor)
    if call.integer:
        made.scales = UNIT[call.dtype]
    gate = call.emitter.emit("LOGISTIC", (value.tensor,), made)
    return call.emit("MUL", (value.tensor, gate), value.layout)


@TABLE.rule("hardsigmoid", always)
def _hardsigmoid(call: Call) -> Value:
    """Rule 2."""
    value = call.read("self")
    dtype = call.dtype if call.integer else ""
    three = call.emitter.number(3.0, dtype, "three")
    sixth = call.emitter.number(1 / 6, dtype, "sixth")
    made = call.emitter.like(value.tensor)
    if call.integer:
        made.scales = _SIX[call.dtype]
    call.emitter.emit("ADD", (value.tensor, three), made, fusedActivationFunction=3)
    return call.emit("MUL", (made, sixth), value.layout)


@TABLE.rule("pow.Tensor_Scalar")
def _power(call: Call) -> Value:
    value = call.read("self")
    exponent = call.arg("exponent")
    if exponent == 2:
        return call.emit("MUL", (value.tensor, value.tensor), value.layout)
    if exponent == 0.5:
        return call.emit("SQRT", (value.tensor,), value.layout)
    number = call.emitter.number(float(exponent), name="exponent")
    return call.emit("POW", (value.tensor, number), value.layout)


@TABLE.rule("_to_copy to.dtype to.dtype_layout")
def _cast(call: Call) -> Value:
    value = call.read("self")
    made = call.output(value.layout)
    if made.dtype == value.tensor.dtype:
        return value
    return Value(call.emitter.emit("CAST", (value.tensor,), made), value.layout)


@TABLE.rule("where.self")
def _where(call: Call) -> Value:
    if not call.read("condition").shape:
        raise UnsupportedError("a condition of one value")
    return _of_two("SELECT_V2", call, "condition", "self", "other")


@TABLE.rule("masked_fill.Scalar")
def _masked_fill(call: Call) -> Value:
    return _of_two("SELECT_V2", call, "mask", "value", "self")


for _code in ("ADD", "SUB", "MUL"):
    _names = f"{_code.lower()}.Tensor {_code.lower()}.Scalar"
    TABLE.add(_names, partial(_binary, _code), _few_axes, fuses=True)
TABLE.add("rsub.Scalar", lambda call: _binary("SUB", call, "other", "self"), _few_axes)
for _code in ("MAXIMUM", "MINIMUM"):
    TABLE.add(_code.lower(), partial(_selected, _code), _few_axes, keeps=True)
for _names, _code in {
    "eq.Tensor eq.Scalar": "EQUAL",
    "ne.Tensor ne.Scalar": "NOT_EQUAL",
    "gt.Tensor gt.Scalar": "GREATER",
    "ge.Tensor ge.Scalar": "GREATER_EQUAL",
    "lt.Tensor lt.Scalar": "LESS",
    "le.Tensor le.Scalar": "LESS_EQUAL",
    "logical_and bitwise_and.Tensor": "LOGICAL_AND",
    "logical_or": "LOGICAL_OR",
    "remainder.Tensor remainder.Scalar": "FLOOR_MOD",
}.items():
    TABLE.add(_names, partial(_of_two, _code))
for _code in ("ABS", "NEG", "EXP", "LOG", "SQRT", "RSQRT", "SIN", "COS", "FLOOR", "CEIL"):
    TABLE.add(_code.lower(), partial(_unary, _code))
for _names, _code in {
    "round": "ROUND",
    "sign": "SIGN",
    "logical_not bitwise_not": "LOGICAL_NOT",
}.items():
    TABLE.add(_names, partial(_unary, _code))
TABLE.add("sigmoid", partial(_unary, "LOGISTIC"), partial(in_steps, UNIT))
TABLE.add("tanh", partial(_unary, "TANH"), partial(in_steps, AROUND_ZERO))
TABLE.add("hardswish", partial(_unary, "HARD_SWISH"), _int8)
