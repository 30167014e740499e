"""Operators that follow a convolution or linear layer become part of its kernel.

1. A clamp. The integers are the same: rounding is monotone, so a clamp before it (the kernel's ``hardtanh``)
   at values that stand for integers equals a clamp of integers after it.
2. An activation function. The reference model quantizes between the two; the joint kernel rounds once, behind
   the function. With a scale of the convolution of at most four times that of the result both agree within
   two integer steps (the functions' slopes are below 1.14).
3. An addition, of a 2d convolution that is the later of the operands, so that nothing has to be moved. With a
   scale of the convolution of at most twice that of the sum the two differ by one integer step at most.

In 2 and 3 values are not compared that the reference model cuts off at the ends of the range in between; the
record of such a kernel says that it rounds once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from backquant.graph import contract, get_module
from backquant.lower.contracts import kernels_are_recorded, merge_records
from backquant.lower.kernels import elementwise
from backquant.lower.kernels.conv import OnednnConv
from backquant.lower.kernels.conv_add import ConvAddConfig, OnednnConvAdd
from backquant.lower.kernels.linear import OnednnLinear
from backquant.lower.kernels.lookup import Lookup, LookupConfig, clamp
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.postop import PostOp
from backquant.lower.machine import may_overwrite
from backquant.lower.rule import KernelUse

_Kernel = OnednnConv | OnednnLinear
#: A kernel's node, what it calls for the follower, too, and what that reads besides.
_Joint = tuple[Node, torch.nn.Module, tuple[Node, ...]]
_ADDS = (elementwise.add, elementwise.add_relu)


@contract(ensures=[kernels_are_recorded])
def fuse_followers(
    graph_module: GraphModule, kernels: Sequence[KernelUse | None], records: dict[Node, int]
) -> list[KernelUse | None]:
    """Fuse each such operator; returns the kernels' records after it, ``None`` for one that was merged.

    ``records``: the position in ``kernels`` of the record of each kernel node. Each kernel module must be
    called once. The graph is edited in place. Cost: linear in the graph.
    """
    found = list(kernels)
    for rule in (_clamp, _lookup, _add):
        for node in list(graph_module.graph.nodes):
            joint = rule(graph_module, node)
            if joint is not None:
                source, made, more = joint
                graph_module.add_submodule(str(source.target), made)
                node.replace_all_uses_with(source)
                graph_module.graph.erase_node(node)
                source.args = (*source.args, *more)
                merge_records(found, records, (source, node), str(getattr(made, "name", "")))
    return found


def _kernel(graph_module: GraphModule, source: Any) -> Any:
    """The module that makes ``source``, if only one node reads that."""
    called = isinstance(source, Node) and source.op == "call_module" and len(source.users) == 1
    return get_module(graph_module, str(source.target)) if called else None


def _remade(kernel: _Kernel, kind: Callable[..., Any], config: Any) -> Any:
    """A kernel of this class and configuration, with the weights of ``kernel``."""
    tensors = WeightTensors(
        kernel.weight, kernel.weight_scale, kernel.weight_zero_point, kernel.bias
    )
    return kind(config, tensors).train(kernel.training)


def _clamp(graph_module: GraphModule, node: Node) -> _Joint | None:
    """Rule 1."""
    if node.op != "call_function" or node.target is not clamp:
        return None
    source, low, high = node.args
    kernel = _kernel(graph_module, source)
    made = clamped(kernel, low, high) if isinstance(kernel, _Kernel) else None  # type: ignore[arg-type]
    return None if made is None else (source, made, ())  # type: ignore[return-value]


def clamped(kernel: _Kernel, low: int, high: int) -> _Kernel | None:
    """``kernel`` with its integers clamped to ``[low, high]``; ``None`` if it does not admit that.

    >>> from backquant.lower.kernels.linear import LinearConfig
    >>> one, zero = torch.ones(1, 1, dtype=torch.int8), torch.zeros(1, dtype=torch.int64)
    >>> plain = OnednnLinear(
    ...     LinearConfig(1.0, 0, 0.5, 10, torch.uint8), WeightTensors(one, torch.ones(1), zero, None)
    ... )
    >>> clamped(plain, 10, 22).config.post_numbers
    (0.0, 6.0)
    """
    config = kernel.config
    if config.post_op not in ("none", "relu", "hardtanh"):
        return None
    bounds = [(b - config.out_zero_point) * config.out_scale for b in (low, high)]
    if config.post_op == "relu":
        bounds[0] = max(bounds[0], 0.0)
    elif config.post_op == "hardtanh":
        bounds = [max(bounds[0], config.post_numbers[0]), min(bounds[1], config.post_numbers[1])]
    if bounds[0] > bounds[1]:
        return None
    changed = dataclasses.replace(config, post_op="hardtanh", post_numbers=(bounds[0], bounds[1]))
    return _remade(kernel, type(kernel), changed)  # type: ignore[no-any-return]


def _lookup(graph_module: GraphModule, node: Node) -> _Joint | None:
    """Rule 2."""
    table = get_module(graph_module, str(node.target)) if node.op == "call_module" else None
    source: Any = node.args[0] if node.args else None
    kernel = _kernel(graph_module, source) if isinstance(table, Lookup) else None
    if not isinstance(table, Lookup) or not isinstance(kernel, _Kernel):
        return None
    made = with_function(kernel, table.config)
    return None if made is None else (source, made, ())


def with_function(kernel: _Kernel, table: LookupConfig) -> _Kernel | None:
    """``kernel`` with the function of ``table`` behind it; ``None`` if it does not admit that.

    >>> from backquant.lower.kernels.linear import LinearConfig
    >>> one, zero = torch.ones(1, 1, dtype=torch.int8), torch.zeros(1, dtype=torch.int64)
    >>> plain = OnednnLinear(
    ...     LinearConfig(1.0, 0, 0.5, 10, torch.uint8), WeightTensors(one, torch.ones(1), zero, None)
    ... )
    >>> with_function(plain, LookupConfig("silu", "swish", (), "", 0.25, 2)).name
    'onednn.qlinear_pointwise(swish, rounds once)'
    """
    config = kernel.config
    if config.post_op != "none" or config.out_dtype != torch.uint8 or table.post_op == "none":
        return None
    if not _admits(kernel, PostOp(table.post_op)) or config.out_scale > 4 * table.out_scale:
        return None
    names = ("post_op", "post_numbers", "post_algorithm", "out_scale", "out_zero_point")
    function: dict[str, Any] = {name: getattr(table, name) for name in names}
    changed = dataclasses.replace(config, rounds_once=True, **function)
    return _remade(kernel, type(kernel), changed)  # type: ignore[no-any-return]


def _admits(kernel: _Kernel, post_op: PostOp) -> bool:
    if isinstance(kernel, OnednnLinear) or kernel.is_linear:
        return post_op.admitted_by_linear
    return post_op.applied_by_conv(len(kernel.config.stride))


def _add(graph_module: GraphModule, node: Node) -> _Joint | None:
    """Rule 3."""
    if node.op != "call_function" or node.target not in _ADDS or node.args[0] is node.args[3]:
        return None
    conv, other = node.args[0], node.args[3]
    (other_scale, other_zero_point), (out_scale, out_zero_point) = node.args[4:6], node.args[6:8]
    assert isinstance(conv, Node) and isinstance(other, Node) and isinstance(out_scale, float)
    if conv < other:
        conv, other = other, conv
        other_scale, other_zero_point = node.args[1:3]
    kernel = _kernel(graph_module, conv)
    if not isinstance(kernel, OnednnConv):
        return None
    c = kernel.config
    plain = c.post_op == "none" and c.out_dtype == torch.uint8 and len(c.stride) == 2
    if not plain or c.out_scale > 2 * out_scale:
        return None
    names = ("stride", "padding", "dilation", "groups", "x_scale", "x_zero_point")
    own: dict[str, Any] = {name: getattr(c, name) for name in names}
    config = ConvAddConfig(
        **own,
        other_scale=other_scale,  # type: ignore[arg-type]  # literals of the graph
        other_zero_point=other_zero_point,  # type: ignore[arg-type]
        out_scale=out_scale,
        out_zero_point=out_zero_point,  # type: ignore[arg-type]
        relu=node.target is elementwise.add_relu,
        overwrite=conv.args[0] is not other and may_overwrite(graph_module, other, conv, node),
        rounds_once=True,
    )
    return conv, _remade(kernel, OnednnConvAdd, config), (other,)
