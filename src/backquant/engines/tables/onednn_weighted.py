"""oneDNN kernels on plain integers for convolutions and linear layers, with an activation fused."""

from __future__ import annotations

import torch

from backquant.dtypes import QParams
from backquant.engines.tables.layer_calls import WeightedCall, conv_rules, linear_rules
from backquant.engines.tables.spellings import post_op_of
from backquant.engines.tables.weights import check_weight
from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.postop import PostOp, within
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
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
