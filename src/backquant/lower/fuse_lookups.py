"""An activation function that follows a convolution or linear layer becomes part of its kernel.

The reference model quantizes between the two; the joint kernel rounds once, behind the function. With a
scale of the convolution of at most four times that of the result both agree within two integer steps
(the functions' slopes are below 1.14), but for values that the reference model cuts off at the ends of
the range in between. The record of the kernel says that it rounds once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from backquant.graph import contract
from backquant.lower.contracts import kernels_are_recorded, merge_records
from backquant.lower.kernels.conv import OnednnConv
from backquant.lower.kernels.linear import OnednnLinear
from backquant.lower.kernels.lookup import Lookup, LookupConfig
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.postop import PostOp
from backquant.lower.rule import KernelUse

_Kernel = OnednnConv | OnednnLinear


@contract(ensures=[kernels_are_recorded])
def fuse_lookups(
    graph_module: GraphModule, kernels: Sequence[KernelUse | None], records: dict[Node, int]
) -> list[KernelUse | None]:
    """Fuse each such function; returns the kernels' records after it, ``None`` for one that was merged.

    ``records``: the position in ``kernels`` of the record of each kernel node. Each kernel module must
    be called once. The graph is edited in place.
    """
    found = list(kernels)
    for node in list(graph_module.graph.nodes):
        table = _module(graph_module, node)
        source = node.args[0] if node.args else None
        if not isinstance(table, Lookup) or not isinstance(source, Node) or len(source.users) != 1:
            continue
        kernel = _module(graph_module, source)
        if not isinstance(kernel, (OnednnConv, OnednnLinear)):
            continue
        made = joined(kernel, table.config)
        if made is None:
            continue
        graph_module.add_submodule(str(source.target), made)
        node.replace_all_uses_with(source)
        graph_module.graph.erase_node(node)
        merge_records(found, records, (source, node), made.name)
    return found


def _module(graph_module: GraphModule, node: Node) -> torch.nn.Module | None:
    return graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None


def joined(kernel: _Kernel, table: LookupConfig) -> _Kernel | None:
    """``kernel`` with the function of ``table`` behind it; ``None`` if it does not admit that.

    >>> from backquant.lower.kernels.linear import LinearConfig
    >>> one, zero = torch.ones(1, 1, dtype=torch.int8), torch.zeros(1, dtype=torch.int64)
    >>> plain = OnednnLinear(
    ...     LinearConfig(1.0, 0, 0.5, 10, torch.uint8), WeightTensors(one, torch.ones(1), zero, None)
    ... )
    >>> joined(plain, LookupConfig("silu", "swish", (), "", 0.25, 2)).name
    'onednn.qlinear_pointwise(swish, rounds once)'
    """
    config = kernel.config
    if config.post_op != "none" or config.out_dtype != torch.uint8 or table.post_op == "none":
        return None
    if not _admits(kernel, PostOp(table.post_op)) or config.out_scale > 4 * table.out_scale:
        return None
    changed = dataclasses.replace(
        config,
        post_op=table.post_op,
        post_numbers=table.post_numbers,
        post_algorithm=table.post_algorithm,
        out_scale=table.out_scale,
        out_zero_point=table.out_zero_point,
        rounds_once=True,
    )
    tensors = WeightTensors(
        kernel.weight, kernel.weight_scale, kernel.weight_zero_point, kernel.bias
    )
    made = type(kernel)(changed, tensors)  # type: ignore[arg-type]  # its own configuration's class
    made.train(kernel.training)
    return made


def _admits(kernel: _Kernel, post_op: PostOp) -> bool:
    if isinstance(kernel, OnednnLinear) or kernel.is_linear:
        return post_op.admitted_by_linear
    return post_op.applied_by_conv(len(kernel.config.stride))
