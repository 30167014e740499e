"""Functions of one value, also with a number beside it, as tables of 256 results.

The table is filled by the reference model's own operators, so that the result equals the reference
model bit for bit, whatever the qparams of input and output.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from backquant.dtypes import QParams
from backquant.engines.tables.spellings import RELUS, post_op_of
from backquant.graph.requantize import quantize_rounded
from backquant.lower.kernels.integer.lookup_tables import IntegerTable, TableConfig, every_integer
from backquant.lower.kernels.lookup import Lookup, LookupConfig, tabulate
from backquant.lower.qdq import dequantize_target, quantize_target
from backquant.lower.rule import Emit, LowerRule, Site, Step, operand
from backquant.match.plan import Reason
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode

_RECORDED = (
    *("sigmoid", "hardsigmoid", "tanh", "hardswish", "leaky_relu", "elu", "gelu", "silu", "prelu"),
    *("relu", "relu6", "hardtanh", "clamp"),
)
# What has no record is quantized where another package's description names it.
_MODULES: tuple[Any, ...] = (
    nn.CELU, nn.SELU, nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink,
    nn.Hardshrink, nn.Softshrink, nn.Threshold,
)  # fmt: skip
_FUNCTIONS: tuple[Any, ...] = (
    F.sigmoid, F.tanh, F.elu_, F.celu, F.selu, F.mish, F.softplus, F.softsign,
    F.logsigmoid, F.tanhshrink, F.hardshrink, F.softshrink, F.threshold,
    torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.abs, torch.neg, torch.square, torch.pow,
    torch.reciprocal, torch.erf, torch.sin, torch.cos, torch.floor, torch.ceil, torch.round,
    operator.neg, operator.abs, operator.pow, torch.clamp_min, torch.clamp_max,
)  # fmt: skip
_METHODS: tuple[Any, ...] = (
    "exp", "log", "sqrt", "rsqrt", "abs", "neg", "square",
    "pow", "reciprocal", "erf", "floor", "ceil", "round", "clamp_min", "clamp_max",
)  # fmt: skip
# With two tensors these are other operators; with one tensor and a number they are functions of it.
WITH_NUMBER: tuple[Any, ...] = (
    *spellings("add", "sub", "mul", "maximum", "minimum"),
    torch.rsub, torch.div, torch.true_divide, operator.truediv, operator.itruediv, "div", "div_",
)  # fmt: skip
POINTWISE: tuple[Any, ...] = (
    *spellings(*_RECORDED), *_MODULES, *_FUNCTIONS, *_METHODS, *WITH_NUMBER,
)  # fmt: skip


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
