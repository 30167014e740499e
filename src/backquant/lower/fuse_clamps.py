"""Clamps that follow a convolution or linear layer become part of its kernel.

The integers are the same: rounding is monotone, so a clamp before it (the kernel's ``hardtanh``) at
values that stand for integers equals a clamp of integers after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.fx import GraphModule, Node

from backquant.graph import contract, get_module
from backquant.lower.contracts import kernels_are_recorded, merge_records
from backquant.lower.kernels.conv import OnednnConv
from backquant.lower.kernels.linear import OnednnLinear
from backquant.lower.kernels.lookup import clamp
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.rule import KernelUse

_Kernel = OnednnConv | OnednnLinear


@contract(ensures=[kernels_are_recorded])
def fuse_clamps(
    graph_module: GraphModule, kernels: Sequence[KernelUse], records: dict[Node, int]
) -> list[KernelUse | None]:
    """Fuse each such clamp; returns the kernels' records after it, ``None`` for one that was merged.

    ``records``: the position in ``kernels`` of the record of each kernel node. Each kernel module
    must be called once. The graph is edited in place.
    """
    found: list[KernelUse | None] = list(kernels)
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node.target is not clamp:
            continue
        source, low, high = node.args
        kernel = _only_for(graph_module, source)
        merged = clamped(kernel, low, high) if kernel is not None else None
        if merged is None:
            continue
        graph_module.add_submodule(str(source.target), merged)
        node.replace_all_uses_with(source)
        graph_module.graph.erase_node(node)
        merge_records(found, records, (source, node), merged.name)
    return found


def _only_for(graph_module: GraphModule, source: object) -> _Kernel | None:
    """The kernel that makes ``source``, if only one node reads that."""
    if not isinstance(source, Node) or source.op != "call_module" or len(source.users) != 1:
        return None
    module = get_module(graph_module, str(source.target))
    return module if isinstance(module, (OnednnConv, OnednnLinear)) else None


def clamped(kernel: _Kernel, low: int, high: int) -> _Kernel | None:
    """``kernel`` with its integers clamped to ``[low, high]``; ``None`` if it does not admit that.

    >>> import torch
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
    numbers = (bounds[0], bounds[1])
    changed = dataclasses.replace(config, post_op="hardtanh", post_numbers=numbers)
    tensors = WeightTensors(
        kernel.weight, kernel.weight_scale, kernel.weight_zero_point, kernel.bias
    )
    made = type(kernel)(changed, tensors)  # type: ignore[arg-type]  # its own configuration's class
    made.train(kernel.training)
    return made
