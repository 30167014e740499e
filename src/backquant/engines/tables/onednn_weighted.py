"""oneDNN kernels on plain integers for convolutions and linear layers, with an activation fused."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from backquant.dtypes import QParams
from backquant.engines.tables.arguments import RELUS, numbers, post_op_of, refuse_float_input
from backquant.engines.tables.layer_calls import (
    WeightedCall,
    conv_rules,
    explicit_padding,
    linear_rules,
)
from backquant.engines.tables.weights import check_weight, module_weight
from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.conv_add import ConvAddConfig, OnednnConvAdd
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.postop import PostOp, within
from backquant.lower.machine import may_overwrite
from backquant.lower.rule import Emit, LowerRule, Site, operand
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Conv2d
from backquant.reason_codes import ReasonCode


def onednn_weighted_rules() -> list[LowerRule]:
    """Rules for convolutions and linear layers.

    >>> len(onednn_weighted_rules())
    8
    """
    return [*conv_rules(_conv), *linear_rules(_linear)]


def _post_op(site: Site) -> PostOp | Reason:
    """The fused activation, which also keeps the result in its range."""
    post_op = post_op_of(site.steps[1] if len(site.steps) > 1 else None)
    if post_op is None:
        return site.refuse(
            ReasonCode.POST_OP, "an activation with computed numbers", "literal numbers"
        )
    kept = within(post_op, site.out)
    if kept is None:
        asked = f"{post_op.name} to {site.out}"
        return site.refuse(
            ReasonCode.POST_OP, asked, f"{post_op.name} to the full range of the dtype"
        )
    return kept


def _out(out: QParams | None) -> tuple[float, int, torch.dtype]:
    return (1.0, 0, torch.float32) if out is None else (*out.args, out.dtype)


def _conv(site: Site, call: WeightedCall) -> Emit | Reason:
    x, geometry = call.x.qparams, call.geometry
    assert x is not None and geometry is not None
    refused = check_weight(site, call.weight, x, call.axis, geometry.groups)
    if refused:
        return refused
    if site.out is not None and site.out.dtype != torch.uint8:
        return site.refuse(
            ReasonCode.OUTPUT_DTYPE, str(site.out.dtype), "torch.uint8, or a float output"
        )
    post_op = _post_op(site)
    if isinstance(post_op, Reason):
        return post_op
    if not post_op.admitted_by_conv(len(geometry.stride)):
        return site.refuse(
            ReasonCode.POST_OP, post_op.name, "relu, hardtanh; in 2d: hardswish, swish"
        )
    scale, zero_point, dtype = _out(site.out)
    config = ConvConfig(
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.groups,
        *x.args,
        scale,
        zero_point,
        dtype,
        post_op.name,
        post_op.numbers,
        post_op.algorithm,
    )
    kernel = OnednnConv(config, call.weight)
    return Emit(kernel, (call.x.node,), kernel.name, site.out, in_range=True)


def _linear(site: Site, call: WeightedCall) -> Emit | Reason:
    x = call.x.qparams
    assert x is not None
    refused = check_weight(site, call.weight, x, call.axis)
    if refused:
        return refused
    post_op = _post_op(site)
    if isinstance(post_op, Reason):
        return post_op
    if not post_op.admitted_by_linear:
        return site.refuse(ReasonCode.POST_OP, post_op.name, "a post-op of oneDNN's linear kernel")
    scale, zero_point, dtype = _out(site.out)
    config = LinearConfig(
        *x.args, scale, zero_point, dtype, post_op.name, post_op.numbers, post_op.algorithm
    )
    kernel = OnednnLinear(config, call.weight)
    return Emit(kernel, (call.x.node,), kernel.name, site.out, in_range=True)


# The fused modules ``ConvAdd2d`` and ``ConvAddReLU2d``: convolution and addition in one kernel.
#
# The kernel accumulates into the tensor that is added. It may use that tensor's memory when a kernel
# made it and everything else that reads it has run already (so that nothing aliases or reads it later).

_ADDS: tuple[Any, ...] = (torch.add, operator.add)


def conv_add_rules() -> list[LowerRule]:
    """Rules for a convolution that is added to another tensor, with a ReLU behind or without.

    >>> [rule.name for rule in conv_add_rules()]
    ['conv + add + relu', 'conv + add']
    """
    return [
        LowerRule("conv + add + relu", ((Conv2d,), _ADDS, RELUS), _build),
        LowerRule("conv + add", ((Conv2d,), _ADDS), _build),
    ]


def _build(site: Site) -> Emit | Reason:
    module: Any = site.module
    if len(site.nodes) != 1:
        return site.refuse(ReasonCode.NODES, "a convolution and an addition", "one fused module")
    if module.padding_mode != "zeros":
        return site.refuse(
            ReasonCode.PADDING_MODE, f"padding_mode={module.padding_mode!r}", "'zeros'"
        )
    if len(site.node.args) != 2 or not all(isinstance(a, Node) for a in site.node.args):
        return refuse_float_input(site)
    x, other = (operand(node) for node in site.node.args)  # type: ignore[arg-type]
    if x.qparams is None or other.qparams is None:
        return refuse_float_input(site)
    if site.out is None:
        return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")
    dtypes = {other.qparams.dtype, site.out.dtype}
    if dtypes != {torch.uint8}:
        return site.refuse(ReasonCode.DTYPE, ", ".join(map(str, dtypes)), "torch.uint8 throughout")
    tensors = module_weight(module)
    refused = check_weight(site, tensors, x.qparams, module.weight_axis, module.groups)
    if refused:
        return refused
    dilation = numbers(module.dilation, 2)
    padding = explicit_padding(module.padding, tensors.weight, dilation)
    if padding is None:
        return site.refuse(
            ReasonCode.PADDING, "padding='same' that is not symmetric", "symmetric padding"
        )
    config = ConvAddConfig(
        stride=tuple(numbers(module.stride, 2)),
        padding=tuple(padding),
        dilation=tuple(dilation),
        groups=module.groups,
        x_scale=x.qparams.scale,
        x_zero_point=x.qparams.zero_point,
        other_scale=other.qparams.scale,
        other_zero_point=other.qparams.zero_point,
        out_scale=site.out.scale,
        out_zero_point=site.out.zero_point,
        relu=len(site.steps) == 3,
        overwrite=x.node is not other.node
        and may_overwrite(site.graph_module, other.node, site.node),
    )
    kernel = OnednnConvAdd(config, tensors)
    return Emit(kernel, (x.node, other.node), kernel.name, site.out)
