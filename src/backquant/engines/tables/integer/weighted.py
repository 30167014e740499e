"""Convolutions and linear layers of the integer reference, alone and with an activation function behind."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from backquant.dtypes import QParams, Rounding, is_narrow_float, round_to
from backquant.engines.tables.arguments import RELUS, bind, post_op_of, refuse_float_input
from backquant.engines.tables.integer.lookup_tables import NO_RESULT, emit, result_fields
from backquant.engines.tables.layer_calls import (
    Geometry,
    WeightedCall,
    conv_rules,
    conv_transpose_rules,
    linear_rules,
    module_call,
)
from backquant.engines.tables.pointwise import reference_function
from backquant.engines.tables.weights import functional_linear, module_weight
from backquant.lower.kernels.integer.elementwise import headroom_of
from backquant.lower.kernels.integer.linear import (
    AtEachCallConfig,
    ConvAtEachCallConfig,
    InGroupsConfig,
    IntegerAtEachCall,
    IntegerConvAtEachCall,
    IntegerInGroups,
    IntegerProductAtEachCall,
)
from backquant.lower.kernels.integer.lookup_tables import filled
from backquant.lower.kernels.integer.weighted import (
    ConvAddConfig,
    IntegerConvAdd,
    IntegerWeighted,
    WeightedConfig,
)
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.postop import PostOp
from backquant.lower.qdq import DynamicInput, dynamic_input, quantized_value, token_input
from backquant.lower.rule import Emit, LowerRule, Site, operand
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Conv2d, Linear
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode

# Linear layers and convolutions of the integer reference that quantize their input at each call.


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


_ADDS: tuple[Any, ...] = (torch.add, operator.add)
_ENDS = torch.tensor([-(1 << 15), (1 << 15) - 1], dtype=torch.int16)
_FAR = 8.0  # beyond it activation functions are flat, or the identity


def weighted_rules() -> list[LowerRule]:
    """Rules for convolutions, transposed ones, linear layers, and a convolution with an addition.

    >>> [rule.name for rule in weighted_rules()][:3]
    ['conv + add + relu', 'conv + add', 'conv + activation']
    """
    return [
        LowerRule("conv + add + relu", ((Conv2d,), _ADDS, RELUS), _conv_add),
        LowerRule("conv + add", ((Conv2d,), _ADDS), _conv_add),
        *conv_rules(_weighted, conv_at_each_call),
        *conv_transpose_rules(_weighted, conv_at_each_call),
        *linear_rules(_weighted),
    ]


def _weighted(site: Site, call: WeightedCall) -> Emit | Reason:
    if call.weight.scale.dim() > 1 and call.geometry is None:
        return _in_groups(site, call)
    refused = _check_weight(site, call)
    if refused is not None:
        return refused
    post_op = post_op_of(site.steps[1] if len(site.steps) > 1 else None)
    if post_op is None:
        return site.refuse(
            ReasonCode.POST_OP, "an activation with computed numbers", "literal numbers"
        )
    if site.out is None and post_op.name not in ("none", "relu"):
        return site.refuse(ReasonCode.POST_OP, f"{post_op.name} with a float result", "ReLU")
    fields, tensors = _weighted_fields(site, call), _tensors(call)
    if site.out is None:
        fields |= {"is_float": True, "rectified": post_op.name == "relu"}
        kernel = IntegerWeighted(WeightedConfig(**fields), **tensors)
        return Emit(kernel, (call.x.node,), kernel.name, None)
    more, table = _activation(site, post_op, site.out)
    kernel = IntegerWeighted(WeightedConfig(**{**fields, **more}), **tensors, table=table)
    return emit(site, kernel, call.x.node)


def _in_groups(site: Site, call: WeightedCall) -> Emit | Reason:
    """A linear layer whose sums have a unit for each group: defined where they are requantized in floats."""
    assert call.x.qparams is not None
    arithmetic, fields = site.arithmetic[0], result_fields(site, site.out or NO_RESULT)
    if site.out is not None and arithmetic != "float":
        asked = f"weights in groups with requantization {arithmetic}"
        return site.refuse(ReasonCode.WEIGHT_GRANULARITY, asked, "requantization: float")
    rectified = len(site.steps) > 1
    if rectified and site.steps[1].key not in RELUS:
        return site.refuse(ReasonCode.POST_OP, "an activation behind weights in groups", "ReLU")
    if rectified and site.out is not None:
        fields["quant_min"] = max(quantized_value(0.0, site.out), site.out.quant_min)
    config = InGroupsConfig(
        **fields,
        x_scale=call.x.qparams.scale,
        x_zero_point=call.x.qparams.zero_point,
        is_float=site.out is None,
        is_rectified=rectified,
    )
    kernel = IntegerInGroups(
        config,
        weight=call.weight.weight,
        zero_point=call.weight.zero_point.to(torch.int64),
        scale=call.weight.scale.double(),
        bias=call.weight.bias,
    )
    if site.out is None:
        return Emit(kernel, (call.x.node,), kernel.name, None)
    return emit(site, kernel, call.x.node)


def _check_weight(site: Site, call: WeightedCall) -> Reason | None:
    """Sums have one unit for each output channel: why this weight's scales do not give that."""
    scale, admitted = call.weight.scale, "one scale, or one for each output channel"
    if scale.dim() > 1:
        return site.refuse(ReasonCode.WEIGHT_GRANULARITY, "scales of groups or blocks", admitted)
    if scale.numel() > 1 and call.axis != (1 if call.transposed else 0):
        return site.refuse(ReasonCode.WEIGHT_AXIS, f"scales along axis {call.axis}", admitted)
    return None


def _weighted_fields(site: Site, call: WeightedCall) -> dict[str, Any]:
    assert call.x.qparams is not None
    geometry = call.geometry or Geometry((), (), (), 1)
    weight = call.weight.weight
    dims = weight.dim() - 2
    transposed = "_transpose" if dims and call.transposed else ""
    return {
        **result_fields(site, site.out or NO_RESULT),
        "operator": f"conv{transposed}{dims}d" if dims else "linear",
        "x_zero_point": call.x.qparams.zero_point,
        "stride": geometry.stride,
        "padding": geometry.padding,
        "dilation": geometry.dilation,
        "output_padding": geometry.output_padding,
        "groups": geometry.groups,
        "accumulator_bits": 40 if _is_wide(site) else 32,
    }


def _tensors(call: WeightedCall) -> dict[str, torch.Tensor | None]:
    """The weight as it is, a unit for each output channel, and the bias in these units."""
    assert call.x.qparams is not None
    weight, scale = call.weight.weight, call.weight.scale.reshape(-1)
    zero_point = call.weight.zero_point.reshape(-1).to(torch.int64)
    if zero_point.numel() > 1:
        shape = [1] * weight.dim()
        shape[call.axis] = -1
        zero_point = zero_point.reshape(shape)
    unit = call.x.qparams.scale * scale.double()
    if unit.numel() > 1 and call.transposed and call.geometry is not None:
        unit = unit.repeat(call.geometry.groups)
    bias = call.weight.bias
    if bias is not None:
        bias = round_to(bias.double() / unit, Rounding.HALF_EVEN).to(torch.int64)
    return {"weight": weight, "weight_zero_point": zero_point, "unit": unit, "bias": bias}


def _is_wide(site: Site) -> bool:
    """Whether biases are described with 64 bits: then sums have the 40 bits that accelerators add in."""
    return site.described is not None and site.described.bias_dtype == torch.int64


def _activation(
    site: Site, post_op: PostOp, out: QParams
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The fields that make the activation a part of the kernel, and its table."""
    if post_op.name == "none":
        return {}, None
    if post_op.name in ("relu", "hardtanh"):
        low, high = (quantized_value(bound, out) for bound in post_op.bounds)
        return {"quant_min": max(low, out.quant_min), "quant_max": min(high, out.quant_max)}, None
    if post_op.name == "leaky_relu":
        return {"negative_slope": post_op.numbers[0]}, None
    reach = max(_FAR, abs(out.quant_min - out.zero_point) * out.scale)
    reach = max(reach, abs(out.quant_max - out.zero_point) * out.scale)
    function, scale = _between(site, reach)
    while scale > out.scale / 4:  # its steps are seen in the result: is all of its range needed?
        finer, less = _between(site, reach / 2)
        if not torch.equal(finer(_ENDS), function(_ENDS)):
            break
        function, scale, reach = finer, less, reach / 2
    return {"middle_scale": scale}, filled(torch.int16, function)


def _between(site: Site, reach: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], float]:
    """The activation on 16-bit integers that go as far as ``reach``, and their scale."""
    scale = 2.0 ** math.ceil(math.log2(reach / 2**15))
    middle = QParams(scale, 0, -(1 << 15), (1 << 15) - 1, torch.int16)
    return reference_function(site, middle, site.steps[1:]), scale


def _conv_add(site: Site) -> Emit | Reason:
    if len(site.nodes) != 1:
        return site.refuse(ReasonCode.NODES, "a convolution and an addition", "one fused module")
    if len(site.node.args) != 2 or not all(isinstance(a, Node) for a in site.node.args):
        return refuse_float_input(site)
    x, other = (operand(node) for node in site.node.args)  # type: ignore[arg-type]
    if x.qparams is None or other.qparams is None:
        return refuse_float_input(site)
    call = module_call(site, x)
    if isinstance(call, Reason):
        return call
    if site.out is None:
        return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")
    refused = _check_weight(site, call)
    if refused is not None:
        return refused
    fields = _weighted_fields(site, call)
    if len(site.steps) == 3:
        fields["quant_min"] = max(quantized_value(0.0, site.out), site.out.quant_min)
    config = ConvAddConfig(
        **fields,
        other_scale=other.qparams.scale,
        other_zero_point=other.qparams.zero_point,
        headroom=headroom_of(other.qparams.dtype),
    )
    kernel = IntegerConvAdd(config, **_tensors(call))
    return emit(site, kernel, x.node, other.node)
