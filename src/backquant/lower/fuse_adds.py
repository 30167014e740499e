"""An addition that follows a 2d convolution becomes part of its kernel.

The reference model quantizes the convolution by itself before it adds; the joint kernel adds first
and rounds once. With a scale of the convolution of at most twice that of the sum the two differ by
one integer step at most, but for values that the reference model cuts off at the ends of the
convolution's range. The record of the kernel says that it rounds once.

Of the two operands the later one must be the convolution, so that nothing has to be moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from backquant.graph import contract, get_module
from backquant.lower.contracts import kernels_are_recorded, merge_records
from backquant.lower.kernels import elementwise
from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.conv_add import ConvAddConfig, OnednnConvAdd
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.machine import may_overwrite
from backquant.lower.rule import KernelUse

_ADDS = (elementwise.add, elementwise.add_relu)


@contract(ensures=[kernels_are_recorded])
def fuse_adds(
    graph_module: GraphModule, kernels: Sequence[KernelUse | None], records: dict[Node, int]
) -> list[KernelUse | None]:
    """Fuse each such addition; returns the kernels' records after it, ``None`` for one that was merged.

    ``records``: the position in ``kernels`` of the record of each kernel node. The graph is edited
    in place. Cost: linear in the graph.
    """
    found = list(kernels)
    places = {node: place for place, node in enumerate(graph_module.graph.nodes)}
    for add in list(graph_module.graph.nodes):
        if add.op != "call_function" or add.target not in _ADDS:
            continue
        conv = max((add.args[0], add.args[3]), key=lambda node: places[node])
        if add.args[0] is add.args[3] or not _is_only_for(graph_module, conv, add):
            continue
        made = _joined(graph_module, conv, add)
        if made is not None:
            _replace(graph_module, conv, add, made)
            merge_records(found, records, (conv, add), made.name)
    return found


def _is_only_for(graph_module: GraphModule, conv: Node, add: Node) -> bool:
    """Whether ``conv`` is a convolution kernel that only ``add`` reads."""
    if conv.op != "call_module" or len(conv.users) != 1 or add not in conv.users:
        return False
    return isinstance(get_module(graph_module, str(conv.target)), OnednnConv)


def _joined(graph_module: GraphModule, conv: Node, add: Node) -> OnednnConvAdd | None:
    """The joint kernel; ``None`` if there is none for this pair."""
    kernel = get_module(graph_module, str(conv.target))
    assert isinstance(kernel, OnednnConv)
    c = kernel.config
    first = add.args[0] is conv
    other = add.args[3] if first else add.args[0]
    other_scale, other_zero_point = add.args[4:6] if first else add.args[1:3]
    out_scale, out_zero_point = add.args[6:8]
    assert isinstance(other, Node) and isinstance(out_scale, float)
    if not _can_add(c) or c.out_scale > 2 * out_scale:
        return None
    config = ConvAddConfig(
        stride=c.stride,
        padding=c.padding,
        dilation=c.dilation,
        groups=c.groups,
        x_scale=c.x_scale,
        x_zero_point=c.x_zero_point,
        other_scale=other_scale,  # type: ignore[arg-type]  # literals of the graph
        other_zero_point=other_zero_point,  # type: ignore[arg-type]
        out_scale=out_scale,
        out_zero_point=out_zero_point,  # type: ignore[arg-type]
        relu=add.target is elementwise.add_relu,
        overwrite=conv.args[0] is not other and may_overwrite(graph_module, other, conv, add),
        rounds_once=True,
    )
    tensors = WeightTensors(
        kernel.weight, kernel.weight_scale, kernel.weight_zero_point, kernel.bias
    )
    made = OnednnConvAdd(config, tensors)
    made.train(kernel.training)
    return made


def _can_add(config: ConvConfig) -> bool:
    plain = config.post_op == "none" and config.out_dtype == torch.uint8
    return plain and len(config.stride) == 2


def _replace(graph_module: GraphModule, conv: Node, add: Node, made: OnednnConvAdd) -> None:
    other = add.args[3] if add.args[0] is conv else add.args[0]
    graph_module.add_submodule(str(conv.target), made)
    add.replace_all_uses_with(conv)
    graph_module.graph.erase_node(add)
    conv.args = (conv.args[0], other)
