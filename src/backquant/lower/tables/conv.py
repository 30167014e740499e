"""Convolutions: reference modules and functions, with an activation behind them, to oneDNN kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.postop import PostOp, within
from backquant.lower.qdq import QParams
from backquant.lower.rule import Emit, LowerRule, Operand, Site, operand
from backquant.lower.tables.arguments import bind, numbers, refuse_float_input
from backquant.lower.tables.spellings import POST_OPS, post_op_of
from backquant.lower.tables.weights import check_weight, functional_weight, module_weight
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Conv1d, Conv2d, Conv3d, ReferenceModule

__all__ = ["Geometry", "conv_rules", "explicit_padding", "plain_result"]

_MODULES: tuple[Any, ...] = (Conv1d, Conv2d, Conv3d)
_FUNCTIONS: tuple[Any, ...] = (
    F.conv1d,
    F.conv2d,
    F.conv3d,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
)
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}

Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def conv_rules() -> list[LowerRule]:
    """Rules for convolutions of one to three dimensions, alone and with a unary operator behind.

    >>> [rule.name for rule in conv_rules()]
    ['conv + activation', 'conv', 'functional conv + activation', 'functional conv']
    """
    return [
        LowerRule("conv + activation", (_MODULES, POST_OPS), _module),
        LowerRule("conv", (_MODULES,), _module),
        LowerRule("functional conv + activation", (_FUNCTIONS, POST_OPS), _function),
        LowerRule("functional conv", (_FUNCTIONS,), _function),
    ]


def plain_result(site: Site, post_op: PostOp | None) -> PostOp | Reason:
    """The post-op that also keeps the result in its range, or why there is none."""
    if post_op is None:
        return site.refuse("post-op", "an activation with computed numbers", "literal numbers")
    kept = within(post_op, site.out)
    if kept is None:
        return site.refuse(
            "post-op",
            f"{post_op.name} into the range [{site.out and site.out.quant_min}, "
            f"{site.out and site.out.quant_max}]",
            f"{post_op.name} into the full range of the dtype",
        )
    return kept


def explicit_padding(padding: Any, weight: torch.Tensor, dilation: list[int]) -> list[int] | None:
    """Padding per dimension, also for ``"valid"`` and ``"same"``; ``None`` if it is not symmetric.

    >>> explicit_padding("same", torch.empty(1, 1, 3, 5), [1, 2])
    [1, 4]
    """
    if padding == "valid":
        return [0] * len(dilation)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        return None if any(t % 2 for t in total) else [t // 2 for t in total]
    return numbers(padding, len(dilation))


def _module(site: Site) -> Emit | Reason:
    module: Any = site.module
    if module.padding_mode != "zeros":
        return site.refuse("padding-mode", f"padding_mode={module.padding_mode!r}", "'zeros'")
    if len(site.node.args) != 1 or site.node.kwargs:
        return refuse_float_input(site)
    assert isinstance(module, ReferenceModule)
    tensors = module_weight(module)
    given = (module.stride, module.padding, module.dilation, module.groups)
    x = operand(site.node.args[0])  # type: ignore[arg-type]  # a tensor's node
    return _emit(site, x, tensors, given, module.weight_axis)


def _function(site: Site) -> Emit | Reason:
    found = bind(site.node, _NAMES, _DEFAULTS)
    tensors = found and functional_weight(site.graph_module, found["weight"], found["bias"])
    if not found or not tensors:
        return site.refuse(
            "computed-weight",
            "a weight or bias that is computed in the graph",
            "a constant weight, quantized along axis 0, and a constant bias",
        )
    given = tuple(found[name] for name in ("stride", "padding", "dilation", "groups"))
    return _emit(site, operand(found["input"]), tensors, given, 0)


def _emit(
    site: Site, x: Operand, tensors: WeightTensors, given: tuple[Any, ...], axis: int
) -> Emit | Reason:
    if x.qparams is None:
        return refuse_float_input(site)
    refused = check_weight(site, tensors, x.qparams, axis) or _check_out(site)
    if refused:
        return refused
    dims = tensors.weight.dim() - 2
    stride, dilation = numbers(given[0], dims), numbers(given[2], dims)
    padding = explicit_padding(given[1], tensors.weight, dilation)
    if padding is None:
        return site.refuse("padding", "padding='same' that is not symmetric", "symmetric padding")
    post_op = plain_result(site, post_op_of(site.steps[1] if len(site.steps) > 1 else None))
    if isinstance(post_op, Reason):
        return post_op
    if not post_op.admitted_by_conv:
        return site.refuse("post-op", post_op.name, "relu, hardtanh, hardswish, swish")
    geometry = (tuple(stride), tuple(padding), tuple(dilation), int(given[3]))
    kernel = OnednnConv(_config(x.qparams, site.out, geometry, post_op), tensors)
    return Emit(kernel, (x.node,), kernel.name, site.out, in_range=True)


def _check_out(site: Site) -> Reason | None:
    if site.out is None or site.out.dtype == torch.uint8:
        return None
    return site.refuse("output-dtype", str(site.out.dtype), "torch.uint8, or a float output")


def _config(x: QParams, out: QParams | None, geometry: Geometry, post_op: PostOp) -> ConvConfig:
    stride, padding, dilation, groups = geometry
    scale, zero_point = out.args if out is not None else (1.0, 0)
    return ConvConfig(
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        x_scale=x.scale,
        x_zero_point=x.zero_point,
        out_scale=scale,
        out_zero_point=zero_point,
        out_dtype=out.dtype if out is not None else torch.float32,
        post_op=post_op.name,
        post_numbers=post_op.numbers,
        post_algorithm=post_op.algorithm,
    )
