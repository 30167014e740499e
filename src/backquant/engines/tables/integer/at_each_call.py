"""Linear layers and convolutions of the integer reference that quantize their input at each call."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from backquant.dtypes import is_narrow_float
from backquant.engines.tables.arguments import bind
from backquant.engines.tables.layer_calls import WeightedCall
from backquant.engines.tables.spellings import RELUS
from backquant.engines.tables.weights import functional_linear, module_weight
from backquant.lower.dynamic import DynamicInput, dynamic_input, token_input
from backquant.lower.kernels.integer.linear import (
    AtEachCallConfig,
    ConvAtEachCallConfig,
    IntegerAtEachCall,
    IntegerConvAtEachCall,
    IntegerProductAtEachCall,
)
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Linear
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode


def at_each_call_rules() -> list[LowerRule]:
    """Rules for modules and functions, alone and with a ReLU behind.

    >>> [rule.name for rule in at_each_call_rules()][:2]
    ['linear at each call + relu', 'linear at each call']
    """
    found = []
    for name, key, read in (("", Linear, _module), ("functional ", F.linear, _function)):
        found.append(LowerRule(f"{name}linear at each call + relu", ((key,), RELUS), read))
        found.append(LowerRule(f"{name}linear at each call", ((key,),), read))
    found.append(LowerRule("matmul at each call", (spellings("matmul"),), _product))
    return found


def _module(site: Site) -> Emit | Reason | None:
    if len(site.node.args) != 1 or site.node.kwargs:
        return None
    return _linear(site, site.node.args[0], module_weight(site.module), site.module.weight_axis)  # type: ignore[arg-type]


def _function(site: Site) -> Emit | Reason | None:
    found = functional_linear(site)
    return None if found is None else _linear(site, *found, 0)


def _linear(site: Site, argument: Any, weight: WeightTensors, axis: int) -> Emit | Reason | None:
    by_token = token_input(argument)
    x = by_token or dynamic_input(argument)
    if x is None:
        return None
    if is_narrow_float(x.dtype) or weight.weight.is_floating_point():
        return site.refuse(ReasonCode.DTYPES, "floats of 8 or 16 bits", "integers")
    if weight.scale.dim() == 1 and weight.scale.numel() > 1 and axis != 0:
        admitted = "one scale, one for each output channel, or groups"
        return site.refuse(ReasonCode.WEIGHT_AXIS, f"scales along axis {axis}", admitted)
    fields = _fields(site, x)
    kernel = IntegerAtEachCall(
        AtEachCallConfig(**fields, is_by_token=by_token is not None),
        weight=weight.weight,
        zero_point=weight.zero_point.to(torch.int64),
        scale=weight.scale.double(),
        bias=weight.bias,
    )
    source: Node = x.source
    return Emit(kernel, (source,), kernel.name, None)


def _product(site: Site) -> Emit | Reason | None:
    """A product of two activations; sums have one unit for each row of the first."""
    found = bind(site.node, ("input", "other"), {})
    if found is None:
        return None
    by_token = token_input(found["input"])
    x = by_token or dynamic_input(found["input"])
    y = token_input(found["other"]) or dynamic_input(found["other"])
    if x is None or y is None:
        return None
    if is_narrow_float(x.dtype) or is_narrow_float(y.dtype):
        return site.refuse(ReasonCode.DTYPES, "floats of 8 or 16 bits", "integers")
    if token_input(found["other"]) is not None:
        asked = "a scale for each row of the second matrix, along which is summed"
        return site.refuse(ReasonCode.WEIGHT_AXIS, asked, "one scale, or the rows of the first")
    kernel = IntegerProductAtEachCall(
        AtEachCallConfig(**_fields(site, x), operator="matmul", is_by_token=by_token is not None)
    )
    return Emit(kernel, (x.source, y.source), kernel.name, None)


def _fields(site: Site, x: DynamicInput) -> dict[str, Any]:
    return {
        "integer_dtype": x.dtype,
        "quant_min": x.quant_min,
        "quant_max": x.quant_max,
        "eps": x.eps,
        "is_symmetric": x.symmetric,
        "is_rectified": len(site.steps) > 1,
    }


def conv_at_each_call(site: Site, call: WeightedCall) -> Emit | Reason:
    """A convolution, transposed or not, alone or with a ReLU behind."""
    x, scale = dynamic_input(call.x.node), call.weight.scale
    assert x is not None and call.geometry is not None
    if len(site.steps) > 1 and site.steps[1].key not in RELUS:
        return site.refuse(ReasonCode.POST_OP, "an activation with a float result", "ReLU")
    if is_narrow_float(x.dtype) or call.weight.weight.is_floating_point():
        return site.refuse(ReasonCode.DTYPES, "floats of 8 or 16 bits", "integers")
    admitted = "one scale, or one for each output channel"
    if scale.dim() > 1:
        return site.refuse(ReasonCode.WEIGHT_GRANULARITY, "scales of groups or blocks", admitted)
    if scale.numel() > 1 and call.axis != (1 if call.transposed else 0):
        return site.refuse(ReasonCode.WEIGHT_AXIS, f"scales along axis {call.axis}", admitted)
    dims, geometry = call.weight.weight.dim() - 2, call.geometry
    zero_point = call.weight.zero_point.reshape(-1).to(torch.int64)
    if zero_point.numel() > 1:
        shape = [1] * (dims + 2)
        shape[call.axis] = -1
        zero_point = zero_point.reshape(shape)
    shared = geometry.groups if call.transposed and scale.numel() > 1 else 1
    config = ConvAtEachCallConfig(
        **_fields(site, x),
        operator=f"conv{'_transpose' if call.transposed else ''}{dims}d",
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        output_padding=geometry.output_padding,
        groups=geometry.groups,
    )
    kernel = IntegerConvAtEachCall(
        config,
        weight=call.weight.weight,
        zero_point=zero_point,
        scale=scale.reshape(-1).double().repeat(shared),
        bias=call.weight.bias,
    )
    return Emit(kernel, (x.source,), kernel.name, None)
