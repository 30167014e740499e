"""Linear layers of the integer reference that quantize their input at each call."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from backquant.dtypes import is_narrow_float
from backquant.engines.tables.arguments import bind
from backquant.engines.tables.spellings import RELUS
from backquant.engines.tables.weights import functional_weight, module_weight
from backquant.lower.dynamic import DynamicInput, dynamic_input, token_input
from backquant.lower.kernels.integer.linear import AtEachCallConfig, IntegerAtEachCall
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Linear
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
    return found


def _module(site: Site) -> Emit | Reason | None:
    if len(site.node.args) != 1 or site.node.kwargs:
        return None
    return _linear(site, site.node.args[0], module_weight(site.module), site.module.weight_axis)  # type: ignore[arg-type]


def _function(site: Site) -> Emit | Reason | None:
    found = bind(site.node, ("input", "weight", "bias"), {"bias": None})
    weight = found and functional_weight(site.graph_module, found["weight"], found["bias"])
    return _linear(site, found["input"], weight, 0) if found and weight else None


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
    kernel = IntegerAtEachCall(
        _config(site, x, is_by_token=by_token is not None),
        weight=weight.weight,
        zero_point=weight.zero_point.to(torch.int64),
        scale=weight.scale.double(),
        bias=weight.bias,
    )
    source: Node = x.source
    return Emit(kernel, (source,), kernel.name, None)


def _config(site: Site, x: DynamicInput, *, is_by_token: bool) -> AtEachCallConfig:
    return AtEachCallConfig(
        integer_dtype=x.dtype,
        quant_min=x.quant_min,
        quant_max=x.quant_max,
        eps=x.eps,
        is_symmetric=x.symmetric,
        is_by_token=is_by_token,
        is_rectified=len(site.steps) > 1,
    )
