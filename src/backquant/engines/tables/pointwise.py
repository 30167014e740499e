"""Functions of one value, also with a number beside it, as tables of 256 results.

The table is filled by the reference model's own operators, so that the result equals the reference
model bit for bit, whatever the qparams of input and output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from backquant.dtypes import QParams
from backquant.engines.tables.arguments import (
    CLAMPS,
    FAR_APART,
    HARDTANHS,
    RELU6S,
    RELUS,
    bind,
    first_operand,
    integer_pair,
    post_op_of,
    refuse_far_apart,
    refuse_float_input,
)
from backquant.graph.dialect_ops import quantize_rounded
from backquant.lower.kernels import elementwise, matrix
from backquant.lower.kernels.integer.lookup_tables import IntegerTable, TableConfig, every_integer
from backquant.lower.kernels.lookup import Lookup, LookupConfig, clamp, tabulate
from backquant.lower.qdq import dequantize_target, quantize_target, quantized_value
from backquant.lower.rule import Emit, LowerRule, Site, Step, operand
from backquant.match.plan import Reason
from backquant.operators import all_operators, spellings
from backquant.reason_codes import ReasonCode

_OF_VALUES = [each for each in all_operators() if each.is_pointwise]
POINTWISE: tuple[Any, ...] = tuple(spelling for each in _OF_VALUES for spelling in each.calls)

# With two tensors these are other operators; with one tensor and a number they are functions of it.
WITH_NUMBER: tuple[Any, ...] = tuple(
    spelling for each in _OF_VALUES if each.takes_two for spelling in each.calls
)


def pointwise_rules() -> list[LowerRule]:
    """Rules for functions of one value, and for one with a number followed by a ReLU.

    >>> [rule.name for rule in pointwise_rules()]
    ['number + relu', 'pointwise']
    """
    return [
        LowerRule("number + relu", (WITH_NUMBER, RELUS), _build),
        LowerRule("pointwise", (POINTWISE,), _build),
    ]


def _build(site: Site) -> Emit | Reason:
    sources = site.node.all_input_nodes
    if len(sources) != 1:
        return site.refuse(
            ReasonCode.ARGUMENTS, "an operator of several tensors", "one tensor and numbers"
        )
    x = operand(sources[0])
    if x.qparams is None:
        return site.refuse(ReasonCode.FLOAT_INPUT, "an input computed in float", "an integer input")
    if site.out is None:
        return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")
    widths = {x.qparams.dtype.itemsize, site.out.dtype.itemsize}
    if widths != {1}:
        return site.refuse(
            ReasonCode.DTYPE, f"{x.qparams.dtype} to {site.out.dtype}", "8-bit integers"
        )
    channels = getattr(site.steps[0].module, "num_parameters", 1)
    if channels > 1:
        made: Any = table_by_channel(site, x.qparams, channels)
    else:
        table = tabulate(x.qparams.dtype, reference_function(site, x.qparams))
        made = Lookup(_config(site, site.out), table)
    return Emit(made, (x.node,), made.name, site.out, in_range=True)


def table_by_channel(site: Site, x: QParams, channels: int) -> IntegerTable:
    """A table for each channel (axis 1): of a PReLU with a slope for each."""
    assert site.out is not None
    integers = every_integer(x.dtype).unsqueeze(1).expand(-1, channels)
    table = reference_function(site, x)(integers).t().reshape(-1)
    config = TableConfig(
        operator=label(site),
        low=torch.iinfo(x.dtype).min,
        integer_dtype=site.out.dtype,
        channels=channels,
    )
    return IntegerTable(config, table=table.to(torch.int32))


def _config(site: Site, out: QParams) -> LookupConfig:
    """What the table holds, and, where it is one, the post-op that it could be."""
    name = label(site)
    post_op = post_op_of(site.steps[0]) if len(site.steps) == 1 else None
    if post_op is None or out.dtype != torch.uint8 or not out.is_full_range:
        return LookupConfig(name)
    return LookupConfig(name, post_op.name, post_op.numbers, post_op.algorithm, *out.args)


def reference_function(
    site: Site, x: QParams, steps: Sequence[Step] | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the reference model makes of integers: dequantized, the site's operators, its quantize node.

    ``steps``: only some of the operators.
    """
    assert site.out is not None
    _, rounding = site.arithmetic
    literals, operators = site.out.literals, site.steps if steps is None else steps

    def function(integers: torch.Tensor) -> torch.Tensor:
        value = dequantize_target()(integers, *x.literals)
        for step in operators:
            value = _run(step, value)
        if rounding != "half_even":
            return quantize_rounded(value, *literals, rounding)
        quantized: torch.Tensor = quantize_target()(value, *literals)
        return quantized

    return function


def real_function(site: Site) -> Callable[[torch.Tensor], torch.Tensor]:
    """The site's operators on float64."""
    modules = [None if s.module is None else copy.deepcopy(s.module).double() for s in site.steps]
    steps = [replace(s, module=m) for s, m in zip(site.steps, modules, strict=True)]

    def function(value: torch.Tensor) -> torch.Tensor:
        for step in steps:
            value = _run(step, value)
        return value

    return function


def _run(step: Step, value: torch.Tensor) -> torch.Tensor:
    """One step on ``value``, which stands for the step's only tensor."""
    node, target = step.node, step.node.target
    args = map_arg(node.args, lambda _: value.clone())
    kwargs = map_arg(node.kwargs, lambda _: value.clone())
    with torch.no_grad():
        if step.module is not None:
            result = step.module(value.clone())
        elif isinstance(target, str):
            result = getattr(args[0], target)(*args[1:], **kwargs)
        else:
            result = target(*args, **kwargs)
    assert isinstance(result, torch.Tensor)
    return result


def label(site: Site) -> str:
    """The names of the site's operators."""
    return "+".join(_name(step) for step in site.steps)


def _name(step: Step) -> str:
    if step.module is not None:
        return type(step.module).__name__.lower()
    target: Any = step.node.target
    assert not isinstance(target, Node)
    return target if isinstance(target, str) else str(target.__name__)


# Addition and multiplication of two integer tensors, with a ReLU behind or without.

ADDS: tuple[Any, ...] = spellings("add")
MULS: tuple[Any, ...] = spellings("mul")


def binary_rules() -> list[LowerRule]:
    """Rules for ``x + y`` and ``x * y``.

    >>> [rule.name for rule in binary_rules()]
    ['add + relu', 'add', 'mul + relu', 'mul']
    """
    return [
        LowerRule("add + relu", (ADDS, RELUS), _binary(elementwise.add_relu)),
        LowerRule("add", (ADDS,), _binary(elementwise.add)),
        LowerRule("mul + relu", (MULS, RELUS), _binary(elementwise.mul_relu)),
        LowerRule("mul", (MULS,), _binary(elementwise.mul)),
    ]


_PRODUCTS = (elementwise.mul, elementwise.mul_relu)
_FAR = 2.0**15  # times 255 by 255 steps: the end of 32 bits


def _binary(kernel: Callable[..., torch.Tensor]) -> Callable[[Site], Emit | Reason]:
    def build(site: Site) -> Emit | Reason:
        found = bind(site.node, ("input", "other", "alpha"), {"alpha": 1})
        if found is None or found["alpha"] != 1:
            return site.refuse(ReasonCode.ARGUMENTS, "alpha or out", "x + y, without alpha")
        pair = [found["input"], found["other"]]
        if not all(isinstance(node, Node) for node in pair):
            return site.refuse(ReasonCode.ONE_TENSOR, "a tensor and a number", "two tensors")
        x, y = (operand(node) for node in pair)
        if x.qparams is None or y.qparams is None:
            return site.refuse(
                ReasonCode.FLOAT_INPUT, "an input computed in float", "two integer inputs"
            )
        if site.out is None:
            return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")
        if not x.qparams.dtype == y.qparams.dtype == site.out.dtype:
            asked = f"{x.qparams.dtype}, {y.qparams.dtype} to {site.out.dtype}"
            return site.refuse(
                ReasonCode.MIXED_DTYPES, asked, "one dtype for both inputs and the result"
            )
        if kernel in _PRODUCTS and x.qparams.scale * y.qparams.scale >= _FAR * site.out.scale:
            return site.refuse(
                ReasonCode.KERNEL_DEFECT,
                "a product of one step by one step beyond 2**15 steps of the result",
                "scales of one magnitude: further out the kernel's integers overflow",
            )
        if max(x.qparams.scale, y.qparams.scale) >= FAR_APART * site.out.scale:
            return refuse_far_apart(site)
        args = (x.node, *x.qparams.args, y.node, *y.qparams.args, *site.out.args)
        return Emit(kernel, args, f"quantized.{kernel.__name__}", site.out)

    return build


# Activation functions that stand alone.
#
# Those that cut values off keep the qparams of the input in the reference model, and run as a clamp of
# integers: quantization is monotone, so clamping before or after it is the same.
def clamp_rules() -> list[LowerRule]:
    """Rules for ReLU, ReLU6, Hardtanh and clamp.

    >>> [rule.name for rule in clamp_rules()]
    ['clamp']
    """
    keys: tuple[Any, ...] = (*RELUS, *RELU6S, *HARDTANHS, *CLAMPS)
    return [LowerRule("clamp", (keys,), _clamp)]


def _clamp(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    post_op = post_op_of(site.steps[0])
    if post_op is None:
        return site.refuse(ReasonCode.ARGUMENTS, "bounds that are computed", "literal bounds")
    is_relu = post_op.name == "relu"
    if site.out != x.qparams and not is_relu:
        asked = str(site.out) if site.out is not None else "a float result"
        return site.refuse(ReasonCode.OTHER_QPARAMS, asked, f"the input's: {x.qparams}")
    low, high = integer_bounds(x.qparams, *((0.0, float("inf")) if is_relu else post_op.numbers))
    return Emit(clamp, (x.node, low, high), "aten.clamp(integers)", x.qparams, in_range=True)


def integer_bounds(qparams: QParams, low: float, high: float) -> tuple[int, int]:
    """The integers that the bounds of a clamp become.

    >>> import torch
    >>> integer_bounds(QParams(0.1, 10, 0, 255, torch.uint8), 0.0, 6.0)
    (10, 70)
    """
    return quantized_value(low, qparams), quantized_value(high, qparams)


# Softmax, and products of two integer matrices.

_SOFTMAX: tuple[Any, ...] = spellings("softmax")
_MATMUL: tuple[Any, ...] = spellings("matmul")


def matrix_rules() -> list[LowerRule]:
    """Rules for softmax and for the product of two activations.

    >>> [rule.name for rule in matrix_rules()]
    ['softmax', 'matmul']
    """
    return [LowerRule("softmax", (_SOFTMAX,), _softmax), LowerRule("matmul", (_MATMUL,), _matmul)]


def softmax_dim(site: Site) -> int | Reason:
    """The literal axis of a softmax."""
    dim: Any = None
    if site.steps[0].module is not None:
        dim = site.module.dim
    else:
        defaults = {"input": None, "dim": None, "_stacklevel": 3, "dtype": None}
        arguments = bind(site.node, ("input", "dim", "_stacklevel", "dtype"), defaults)
        dim = arguments["dim"] if arguments else None
    if not isinstance(dim, int):
        return site.refuse(
            ReasonCode.ARGUMENTS, "softmax over an implied dimension", "a literal dim"
        )
    return dim


def _softmax(site: Site) -> Emit | Reason:
    found = integer_pair(site)
    if isinstance(found, Reason):
        return found
    x, out = found
    dim = softmax_dim(site)
    if isinstance(dim, Reason):
        return dim
    assert x.qparams is not None
    args = (x.node, *x.qparams.args, dim, *out.args)
    return Emit(matrix.softmax, args, "quantized.softmax", out)


def _matmul(site: Site) -> Emit | Reason:
    pair = site.node.args
    if len(pair) != 2 or site.node.kwargs or not all(isinstance(node, Node) for node in pair):
        return site.refuse(ReasonCode.ARGUMENTS, "keywords or constants", "two positional tensors")
    x, y = (operand(node) for node in pair)  # type: ignore[arg-type]
    if x.qparams is None or y.qparams is None:
        return site.refuse(
            ReasonCode.FLOAT_INPUT, "a factor computed in float", "two integer factors"
        )
    if site.out is None:
        return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")
    if not x.qparams.dtype == y.qparams.dtype == site.out.dtype:
        asked = f"{x.qparams.dtype}, {y.qparams.dtype} to {site.out.dtype}"
        return site.refuse(
            ReasonCode.MIXED_DTYPES, asked, "one dtype for both factors and the result"
        )
    args = (x.node, *x.qparams.args, y.node, *y.qparams.args, *site.out.args)
    return Emit(matrix.matmul, args, "quantized.matmul", site.out)
