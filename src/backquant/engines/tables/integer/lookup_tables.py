"""Functions of one value as tables, and operators of several integer tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from backquant.dtypes import QParams, interpolated_table
from backquant.engines.tables.arguments import (
    RELUS,
    Joined,
    bind,
    first_operand,
    joined,
    refuse_float_input,
)
from backquant.engines.tables.pointwise import (
    POINTWISE,
    WITH_NUMBER,
    label,
    real_function,
    reference_function,
)
from backquant.engines.tables.weights import functional_weight
from backquant.lower.kernels.integer.elementwise import (
    BinaryConfig,
    IntegerBinary,
    IntegerJoin,
    JoinConfig,
    headroom_of,
)
from backquant.lower.kernels.integer.lookup_tables import IntegerTable, TableConfig, every_integer
from backquant.lower.kernels.integer.result import IntegerKernel
from backquant.lower.qdq import quantized_value
from backquant.lower.rule import Emit, LowerRule, Site, operand
from backquant.match.plan import Reason
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode

# What every rule of the integer reference reads of a site: qparams, and the described arithmetic.


#: for kernels whose sums come out as floats
NO_RESULT = QParams(1.0, 0, -1, 0, torch.int8)


def result_fields(site: Site, out: QParams) -> dict[str, Any]:
    """The fields of a ``Result`` with the qparams ``out``."""
    requantization, rounding = site.arithmetic
    return {
        "out_scale": out.scale,
        "out_zero_point": out.zero_point,
        "quant_min": out.quant_min,
        "quant_max": out.quant_max,
        "integer_dtype": out.dtype,
        "requantization": requantization,
        "rounding": rounding,
    }


def one_operand(site: Site) -> tuple[Node, QParams, QParams] | Reason:
    """The integers that the site reads first, their qparams, and those of the result."""
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if site.out is None:
        return refuse_float_result(site)
    return x.node, x.qparams, site.out


def refuse_float_result(site: Site) -> Reason:
    """The reason for an operator whose result is not quantized."""
    return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")


def emit(site: Site, kernel: IntegerKernel, *nodes: Any) -> Emit:
    """A kernel that gives integers of the site's qparams."""
    return Emit(kernel, nodes, kernel.name, site.out, in_range=True)


_PRODUCTS = ("mul", "matmul")
_BINARY = ("add", "sub", "mul", "matmul", "maximum", "minimum")


def table_rules() -> list[LowerRule]:
    """Rules for functions of one value, and for one with a number followed by a ReLU.

    >>> [rule.name for rule in table_rules()]
    ['number + relu', 'table']
    """
    return [
        LowerRule("number + relu", (WITH_NUMBER, RELUS), _table),
        LowerRule("table", (POINTWISE,), _table),
    ]


def _table(site: Site) -> Emit | Reason:
    site = _with_slopes(site)
    sources = site.node.all_input_nodes[:1] if site.steps[0].module else site.node.all_input_nodes
    if len(sources) != 1:
        return site.refuse(
            ReasonCode.ARGUMENTS, "an operator of several tensors", "one tensor and numbers"
        )
    found = one_operand_of(site, sources[0])
    if isinstance(found, Reason):
        return found
    node, x, out = found
    channels = getattr(site.steps[0].module, "num_parameters", 1)
    integers = every_integer(x.dtype)
    if site.table_entries is None or site.table_entries >= len(integers):
        table = reference_function(site, x)(_by_channel(integers, channels))
    else:
        table = _interpolated(site, x, site.table_entries, channels)
    table = table.t() if channels > 1 else table
    config = TableConfig(
        operator=label(site),
        low=torch.iinfo(x.dtype).min,
        integer_dtype=out.dtype,
        channels=channels,
    )
    return emit(site, IntegerTable(config, table=table.reshape(-1).to(torch.int32)), node)


def _with_slopes(site: Site) -> Site:
    """``torch.prelu`` with constant slopes as the module that holds them."""
    first = site.steps[0]
    if first.key not in spellings("prelu") or first.module is not None:
        return site
    found = bind(site.node, ("input", "weight"), {})
    slopes = found and functional_weight(site.graph_module, found["weight"], None)
    if not found or not slopes:
        return site
    values = (slopes.weight.float() - slopes.zero_point) * slopes.scale
    module = nn.PReLU(values.numel())
    module.weight.data = values.reshape(-1)
    return replace(site, steps=(replace(first, module=module), *site.steps[1:]))


def _by_channel(values: torch.Tensor, channels: int) -> torch.Tensor:
    return values.unsqueeze(1).expand(-1, channels) if channels > 1 else values


def _interpolated(site: Site, x: QParams, entries: int, channels: int) -> torch.Tensor:
    """What a table of ``entries`` holds, and what lies between them.

    TensorFlow Lite and Vela divide by a step that is too small by one part in the number of integers, as
    this does.
    """
    out = site.out
    assert out is not None
    function, info, made = real_function(site), torch.iinfo(x.dtype), torch.iinfo(out.dtype)
    step = out.scale * (made.max - made.min) / (made.max - made.min + 1)

    def steps(places: torch.Tensor) -> torch.Tensor:
        values = function(_by_channel((places - x.zero_point) * x.scale, channels))
        return values / step + out.zero_point

    ends = (out.quant_min, out.quant_max)
    return interpolated_table(steps, info.min, info.max - info.min + 1, entries, ends)


def one_operand_of(site: Site, source: Node) -> tuple[Node, QParams, QParams] | Reason:
    """Integers that ``source`` stands for, their qparams, and those of the result."""
    x = operand(source)
    if x.qparams is None:
        return refuse_float_input(site)
    return refuse_float_result(site) if site.out is None else (x.node, x.qparams, site.out)


def binary_rules() -> list[LowerRule]:
    """Rules for two integer tensors, with a ReLU behind or without.

    >>> [rule.name for rule in binary_rules()][:2]
    ['add + relu', 'add']
    """
    found = []
    for name in _BINARY:
        build = _binary(name)
        if name != "matmul":
            found.append(LowerRule(f"{name} + relu", (_spelled(name), RELUS), build))
        found.append(LowerRule(name, (_spelled(name),), build))
    return found


def _spelled(name: str) -> tuple[Any, ...]:
    if name in ("maximum", "minimum"):
        short = name[:3]
        return tuple(dict.fromkeys((getattr(torch, name), name, getattr(torch, short), short)))
    return spellings(name)


def _binary(name: str) -> Any:
    def build(site: Site) -> Emit | Reason:
        found = bind(site.node, ("input", "other", "alpha"), {"alpha": 1})
        if found is None or found["alpha"] != 1:
            return site.refuse(ReasonCode.ARGUMENTS, "alpha or out", "two tensors, without alpha")
        pair = [found["input"], found["other"]]
        if not all(isinstance(node, Node) for node in pair):
            return site.refuse(ReasonCode.ONE_TENSOR, "a tensor and a number", "two tensors")
        x, y = (operand(node) for node in pair)
        if x.qparams is None or y.qparams is None:
            return refuse_float_input(site)
        if site.out is None and (name not in _PRODUCTS or len(site.steps) == 2):
            return refuse_float_result(site)
        fields = result_fields(site, site.out or NO_RESULT)
        if site.out is not None and len(site.steps) == 2:
            fields["quant_min"] = max(site.out.quant_min, quantized_value(0.0, site.out))
        config = BinaryConfig(
            **fields,
            operator=name,
            x_scale=x.qparams.scale,
            x_zero_point=x.qparams.zero_point,
            y_scale=y.qparams.scale,
            y_zero_point=y.qparams.zero_point,
            is_float=site.out is None,
            headroom=min(headroom_of(x.qparams.dtype), headroom_of(y.qparams.dtype)),
        )
        return emit(site, IntegerBinary(config), x.node, y.node)

    return build


def join_rules() -> list[LowerRule]:
    """Rules for concatenation.

    >>> [rule.name for rule in join_rules()]
    ['cat', 'stack']
    """
    return [LowerRule(name, (spellings(name),), _join) for name in ("cat", "stack")]


def _join(site: Site) -> Emit | Reason:
    found = joined(site)
    if not isinstance(found, Joined):
        return found
    nodes, qparams, dim = found
    out = site.out
    if out is None and len(set(qparams)) == 1:
        out = qparams[0]
    if out is None:
        return refuse_float_result(site)
    config = JoinConfig(
        **result_fields(site, out),
        operator="cat" if site.node.target in spellings("cat") else "stack",
        scales=tuple(q.scale for q in qparams),
        zero_points=tuple(q.zero_point for q in qparams),
        fits=tuple(q == out for q in qparams),
        dim=dim,
    )
    kernel = IntegerJoin(config)
    return Emit(kernel, (nodes,), kernel.name, out, in_range=True)
