"""Operators of one and of two values at each place, and comparisons.

1. Operands of two layouts are brought to that of the first which is not PyTorch's own; sizes are
   broadcast from the last axis on.
2. What LiteRT has no operator for is composed: SiLU is x × sigmoid(x), hard-sigmoid is relu6(x + 3) / 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from backquant.deploy.litert.emitter import Call, Emitter, Rule, Table, activation, bound_arguments
from backquant.deploy.litert.lowered_values import Constant, Layout, UnsupportedError, Value, plain
from backquant.deploy.litert.network import Scales, Tensor
from backquant.operators import overload

# Clamps after an operator: what its kernel does itself, and what is written after it.

CLAMPS = (overload("relu"), overload("relu6"), overload("hardtanh"), overload("clamp"))

_LIMITS = {"INT8": (-128, 127), "INT16": (-32768, 32767)}

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
    given: dict[str, Any] = bound_arguments(node)
    low = given.get("min_val", given.get("min"))
    high = given.get("max_val", given.get("max"))
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def fused_clamp(node: fx.Node, scales: Scales | None, dtype: str = "INT8") -> str | None:
    """The clamp of a kernel that does the same as ``node``; none is needed where the integers end there
    anyway."""
    low, high = bounds(node)
    if scales is not None:
        low, high = effective(low, high, scales, _LIMITS[dtype])
        if (low, high) == (-math.inf, math.inf):
            return "NONE"
        low, high = bounds(node)
    return _CODES.get((low, high))


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
        low, high = effective(low, high, tensor.scales, _LIMITS[tensor.dtype])
    if (low, high) == (-math.inf, math.inf):
        return value
    if code is not None:
        made = _like(emitter, tensor)
        return Value(emitter.emit(code, (tensor,), made), value.layout, value.columns)
    for name, bound in (("MAXIMUM", low), ("MINIMUM", high)):
        if math.isfinite(bound):
            number = Constant("bound", torch.tensor([bound]))
            dtype = tensor.dtype if tensor.scales is not None else ""
            other = emitter.constant(number, tensor.scales, dtype).tensor
            tensor = emitter.emit(name, (tensor, other), _like(emitter, tensor))
    return Value(tensor, value.layout, value.columns)


def _like(emitter: Emitter, tensor: Tensor) -> Tensor:
    return emitter.like(tensor, tensor.shape, signature=tensor.signature)


UNIT = {"INT8": Scales.one(1 / 256, -128), "INT16": Scales.one(1 / 32768, 0)}
AROUND_ZERO = {"INT8": Scales.one(1 / 128, 0), "INT16": Scales.one(1 / 32768, 0)}
_NARROW_RANK = 5  # of kernels that broadcast integers


def common(call: Call, values: list[Value]) -> tuple[list[Tensor], Layout]:
    """Rule 1."""
    rank = len(call.shape)
    full = [v for v in values if len(v.shape) == rank and v.tensor.data is None]
    full = full or [v for v in values if len(v.shape) == rank]
    layout = next((v.layout for v in full if v.layout != plain(rank)), plain(rank))
    return [_aligned(call, value, layout) for value in values], layout


def _aligned(call: Call, value: Value, layout: Layout) -> Tensor:
    rank, missing = len(layout), len(layout) - len(value.shape)
    if missing == rank:
        return value.tensor  # one number
    if missing == 0:
        return call.emitter.laid(value, layout)
    if layout == plain(rank):
        return call.emitter.laid(value, plain(rank - missing))
    ones = (1,) * missing
    tensor = call.emitter.laid(value, plain(rank - missing))
    wide = call.emitter.reshape(tensor, (*ones, *tensor.shape), (*ones, *tensor.signature))
    return call.emitter.laid(Value(wide, plain(rank)), layout)


_NAMES = ("self", "other")


def _binary(code: str, *, fused: bool = True) -> Callable[[Call], Value]:
    def write(call: Call) -> Value:
        alpha = call.arg("alpha", 1)
        values = [call.read(name) for name in _NAMES]
        if alpha != 1:
            values[1] = _scaled(call, values[1], float(alpha))
        tensors, layout = common(call, values)
        options = {"fusedActivationFunction": activation(call)} if fused else {}
        return call.emit(code, tensors, layout, **options)

    return write


def _scaled(call: Call, value: Value, factor: float) -> Value:
    if call.integer:
        raise UnsupportedError("an addition with alpha on integers")
    number = call.emitter.constant(Constant("alpha", torch.tensor(factor)), None, "").tensor
    made = call.emitter.like(value.tensor, value.tensor.shape, signature=value.tensor.signature)
    call.emitter.emit("MUL", (value.tensor, number), made)
    return Value(made, value.layout)


def _reversed_sub(call: Call) -> Value:
    values = [call.read("other"), call.read("self")]
    tensors, layout = common(call, values)
    return call.emit("SUB", tensors, layout)


def _divided(call: Call) -> Value:
    """Integers are divided by a constant: multiplied by its inverse."""
    if not call.integer:
        if call.arg("rounding_mode") is not None:
            raise UnsupportedError("a division that rounds")
        return _binary("DIV")(call)
    other = call.constant("other")
    assert other is not None
    inverse = Constant(f"{other.name}_inverse", 1.0 / other.value.float())
    values = [call.read("self"), call.emitter.constant(inverse, None, call.dtype)]
    tensors, layout = common(call, values)
    return call.emit("MUL", tensors, layout, fusedActivationFunction=activation(call))


def _selected(code: str) -> Callable[[Call], Value]:
    """Maximum and minimum: both operands in the steps of the result."""

    def write(call: Call) -> Value:
        values = [call.read(name, call.scales) for name in _NAMES]
        tensors, layout = common(call, values)
        return call.emit(code, tensors, layout)

    return write


def _unary(code: str, **options: Any) -> Callable[[Call], Value]:
    def write(call: Call) -> Value:
        value = call.read("input" if "input" in call.args else "self")
        made = call.emit(code, (value.tensor,), value.layout, **options)
        made.columns = value.columns
        return made

    return write


def _named_unary(read: Callable[[Call], tuple[str, dict[str, Any]]]) -> Callable[[Call], Value]:
    def write(call: Call) -> Value:
        code, options = read(call)
        return _unary(code, **options)(call)

    return write


def _gelu(call: Call) -> tuple[str, dict[str, Any]]:
    return "GELU", {"approximate": call.arg("approximate", "none") == "tanh"}


def _leaky_relu(call: Call) -> tuple[str, dict[str, Any]]:
    return "LEAKY_RELU", {"alpha": float(call.arg("negative_slope", 0.01))}


def _is_plain_elu(call: Call) -> bool:
    return (call.arg("alpha", 1), call.arg("scale", 1), call.arg("input_scale", 1)) == (1, 1, 1)


def _elu(call: Call) -> Value:
    if not _is_plain_elu(call):
        raise UnsupportedError("ELU with another slope than 1")
    return _unary("ELU")(call)


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
    without_batch = call.emitter.reshape(tensor, tensor.shape[1:], tensor.signature[1:])
    return call.emit("PRELU", (value.tensor, without_batch), value.layout)


def _clamp(call: Call) -> Value:
    name = "input" if "input" in call.args else "self"
    return clamp_after(call.emitter, call.node, call.read(name))


def _copied(call: Call) -> Value:
    return call.read("input" if "input" in call.args else "self")


def _silu(call: Call) -> Value:
    """Rule 2."""
    value = call.read("self")
    made = call.emitter.like(value.tensor, value.tensor.shape, signature=value.tensor.signature)
    if call.integer:
        made.scales = UNIT[call.dtype]
    gate = call.emitter.emit("LOGISTIC", (value.tensor,), made)
    return call.emit("MUL", (value.tensor, gate), value.layout)


def _hardsigmoid(call: Call) -> Value:
    """Rule 2."""
    value = call.read("self")
    dtype = call.dtype if call.integer else ""
    three = call.emitter.constant(Constant("three", torch.tensor(3.0)), None, dtype).tensor
    sixth = call.emitter.constant(Constant("sixth", torch.tensor(1 / 6)), None, dtype).tensor
    made = call.emitter.like(value.tensor, value.tensor.shape, signature=value.tensor.signature)
    if call.integer:
        made.scales = (
            Scales.one(6 / 255, -128) if call.dtype == "INT8" else Scales.one(6 / 32767, 0)
        )
    call.emitter.emit("ADD", (value.tensor, three), made, fusedActivationFunction=3)
    return call.emit("MUL", (made, sixth), value.layout)


def _power(call: Call) -> Value:
    value = call.read("self")
    exponent = call.arg("exponent")
    if exponent == 2:
        return call.emit("MUL", (value.tensor, value.tensor), value.layout)
    if exponent == 0.5:
        return call.emit("SQRT", (value.tensor,), value.layout)
    number = call.emitter.constant(Constant("exponent", torch.tensor(float(exponent))), None, "")
    return call.emit("POW", (value.tensor, number.tensor), value.layout)


def _cast(call: Call) -> Value:
    value = call.read("self")
    made = call.output(value.layout)
    if made.dtype == value.tensor.dtype:
        return value
    call.emitter.emit("CAST", (value.tensor,), made)
    return Value(made, value.layout)


def _where(call: Call) -> Value:
    values = [call.read(name) for name in ("condition", "self", "other")]
    if any(len(value.shape) == 0 for value in values[:1]):
        raise UnsupportedError("a condition of one value")
    tensors, layout = common(call, values)
    return call.emit("SELECT_V2", tensors, layout)


def _masked_fill(call: Call) -> Value:
    values = [call.read("mask"), call.read("value"), call.read("self")]
    tensors, layout = common(call, values)
    return call.emit("SELECT_V2", tensors, layout)


def _to_the_table(scales: dict[str, Scales]) -> Callable[[Call], bool]:
    def fits(call: Call) -> bool:
        return call.scales == scales.get(call.dtype)

    return fits


def _yes(_: Call) -> bool:
    return True


def _int8(call: Call) -> bool:
    return call.dtype == "INT8"


def _few_axes(call: Call) -> bool:
    return len(call.shape) <= _NARROW_RANK and call.arg("alpha", 1) == 1


def _by_a_constant(call: Call) -> bool:
    other = call.constant("other")
    return (
        other is not None
        and bool((other.value != 0).all())
        and call.args.get("rounding_mode") is None
    )


def _is_plain_int8_elu(call: Call) -> bool:
    return _int8(call) and _is_plain_elu(call)


def _as_rules(rows: dict[str, Rule]) -> Table:
    """Rules by names of overloads."""
    made: Table = {}
    for name, rule in rows.items():
        operator, _, kind = name.partition(".")
        made[overload(operator, kind)] = rule
    return made


_ADD = Rule(_binary("ADD"), _few_axes, fuses=True)
_SUB = Rule(_binary("SUB"), _few_axes, fuses=True)
_MUL = Rule(_binary("MUL"), _few_axes, fuses=True)
_DIV = Rule(_divided, _by_a_constant, fuses=True)
_COPY = Rule(_copied, _yes, keeps=True, moves=True)
_CLAMP = Rule(_clamp, _yes, keeps=True)
_FLOATS = {
    "abs.default": "ABS",
    "neg.default": "NEG",
    "exp.default": "EXP",
    "log.default": "LOG",
    "sqrt.default": "SQRT",
    "rsqrt.default": "RSQRT",
    "sin.default": "SIN",
    "cos.default": "COS",
    "floor.default": "FLOOR",
    "ceil.default": "CEIL",
    "round.default": "ROUND",
    "sign.default": "SIGN",
    "logical_not.default": "LOGICAL_NOT",
    "bitwise_not.default": "LOGICAL_NOT",
}
_COMPARISONS = {
    "eq": "EQUAL",
    "ne": "NOT_EQUAL",
    "gt": "GREATER",
    "ge": "GREATER_EQUAL",
    "lt": "LESS",
    "le": "LESS_EQUAL",
}
TABLE: Table = {
    **_as_rules({name: Rule(_unary(code)) for name, code in _FLOATS.items()}),
    **_as_rules(
        {
            f"{name}.{kind}": Rule(_binary(code, fused=False))
            for name, code in _COMPARISONS.items()
            for kind in ("Tensor", "Scalar")
        }
    ),
    **_as_rules(
        {
            "add.Tensor": _ADD,
            "add.Scalar": _ADD,
            "sub.Tensor": _SUB,
            "sub.Scalar": _SUB,
            "mul.Tensor": _MUL,
            "mul.Scalar": _MUL,
            "div.Tensor": _DIV,
            "div.Scalar": _DIV,
            "rsub.Scalar": Rule(_reversed_sub, _few_axes),
            "maximum.default": Rule(_selected("MAXIMUM"), _few_axes, keeps=True),
            "minimum.default": Rule(_selected("MINIMUM"), _few_axes, keeps=True),
            "logical_and.default": Rule(_binary("LOGICAL_AND", fused=False)),
            "bitwise_and.Tensor": Rule(_binary("LOGICAL_AND", fused=False)),
            "logical_or.default": Rule(_binary("LOGICAL_OR", fused=False)),
            "remainder.Tensor": Rule(_binary("FLOOR_MOD", fused=False)),
            "remainder.Scalar": Rule(_binary("FLOOR_MOD", fused=False)),
            "pow.Tensor_Scalar": Rule(_power),
            "where.self": Rule(_where),
            "masked_fill.Scalar": Rule(_masked_fill),
            "relu.default": _CLAMP,
            "relu6.default": _CLAMP,
            "hardtanh.default": _CLAMP,
            "clamp.default": _CLAMP,
            "clone.default": _COPY,
            "contiguous.default": _COPY,
            "detach.default": _COPY,
            "alias.default": _COPY,
            "lift_fresh_copy.default": _COPY,
            "dropout.default": _COPY,
            "_to_copy.default": Rule(_cast),
            "to.dtype": Rule(_cast),
            "to.dtype_layout": Rule(_cast),
            "sigmoid.default": Rule(_unary("LOGISTIC"), _to_the_table(UNIT)),
            "tanh.default": Rule(_unary("TANH"), _to_the_table(AROUND_ZERO)),
            "gelu.default": Rule(_named_unary(_gelu), _int8),
            "elu.default": Rule(_elu, _is_plain_int8_elu),
            "hardswish.default": Rule(_unary("HARD_SWISH"), _int8),
            "leaky_relu.default": Rule(_named_unary(_leaky_relu), _yes),
            "prelu.default": Rule(_prelu, _int8),
            "silu.default": Rule(_silu, _yes),
            "hardsigmoid.default": Rule(_hardsigmoid, _yes),
        }
    ),
}
