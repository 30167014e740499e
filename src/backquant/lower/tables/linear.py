"""Linear layers: reference modules and functions, with an activation behind them, to oneDNN kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.postop import PostOp
from backquant.lower.qdq import QParams
from backquant.lower.rule import Emit, LowerRule, Operand, Site, operand
from backquant.lower.tables.arguments import bind, refuse_float_input
from backquant.lower.tables.conv import plain_result
from backquant.lower.tables.spellings import POST_OPS, post_op_of
from backquant.lower.tables.weights import check_weight, functional_weight, module_weight
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Linear, ReferenceModule

__all__ = ["linear_rules"]

_MODULES: tuple[Any, ...] = (Linear,)
_FUNCTIONS: tuple[Any, ...] = (F.linear,)
_NAMES = ("input", "weight", "bias")


def linear_rules() -> list[LowerRule]:
    """Rules for linear layers, alone and with a unary operator behind.

    >>> [rule.name for rule in linear_rules()]
    ['linear + activation', 'linear', 'functional linear + activation', 'functional linear']
    """
    return [
        LowerRule("linear + activation", (_MODULES, POST_OPS), _module),
        LowerRule("linear", (_MODULES,), _module),
        LowerRule("functional linear + activation", (_FUNCTIONS, POST_OPS), _function),
        LowerRule("functional linear", (_FUNCTIONS,), _function),
    ]


def _module(site: Site) -> Emit | Reason:
    module = site.module
    assert isinstance(module, ReferenceModule)
    if len(site.node.args) != 1 or site.node.kwargs:
        return refuse_float_input(site)
    x = operand(site.node.args[0])  # type: ignore[arg-type]
    return _emit(site, x, module_weight(module), module.weight_axis)


def _function(site: Site) -> Emit | Reason:
    found = bind(site.node, _NAMES, {"bias": None})
    tensors = found and functional_weight(site.graph_module, found["weight"], found["bias"])
    if not found or not tensors:
        return site.refuse(
            "computed-weight",
            "a weight or bias that is computed in the graph",
            "a constant weight, quantized along axis 0, and a constant bias",
        )
    return _emit(site, operand(found["input"]), tensors, 0)


def _emit(site: Site, x: Operand, tensors: WeightTensors, axis: int) -> Emit | Reason:
    if x.qparams is None:
        return refuse_float_input(site)
    refused = check_weight(site, tensors, x.qparams, axis)
    if refused:
        return refused
    post_op = plain_result(site, post_op_of(site.steps[1] if len(site.steps) > 1 else None))
    if isinstance(post_op, Reason):
        return post_op
    if not post_op.admitted_by_linear:
        return site.refuse("post-op", post_op.name, "a post-op of oneDNN's linear kernel")
    kernel = OnednnLinear(_config(x.qparams, site.out, post_op), tensors)
    return Emit(kernel, (x.node,), kernel.name, site.out, in_range=True)


def _config(x: QParams, out: QParams | None, post_op: PostOp) -> LinearConfig:
    scale, zero_point = out.args if out is not None else (1.0, 0)
    return LinearConfig(
        x_scale=x.scale,
        x_zero_point=x.zero_point,
        out_scale=scale,
        out_zero_point=zero_point,
        out_dtype=out.dtype if out is not None else torch.float32,
        post_op=post_op.name,
        post_numbers=post_op.numbers,
        post_algorithm=post_op.algorithm,
    )
