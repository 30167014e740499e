"""What of ``DTypeConfig.only`` a use of an operator goes beyond: groups, strides, axes of means."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph import GraphIndex

__all__ = ["uses_beyond"]

_CONVS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_MODULES = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_STRIDE, _GROUPS = 3, 6  # the positions of the arguments in each of these functions
_LONG = 4  # a stride that is not short
_INNER = ((2, 3), (-2, -1))


def uses_beyond(root: fx.Node, graph: GraphIndex) -> frozenset[tuple[str, str]]:
    """Pairs of a value of ``only`` that does not hold, and what the node asks in its place.

    >>> gm = fx.symbolic_trace(lambda x: x.mean(1))
    >>> uses_beyond(list(gm.graph.nodes)[1], GraphIndex(gm))
    frozenset({('inner_axes', 'mean over axes 1')})
    """
    if root.target in (torch.mean, "mean"):
        return _of_mean(root)
    groups, inputs, stride = _geometry(root, graph)
    found = set()
    if groups != 1:
        found = {("not_grouped", f"{groups} groups"), ("short_last_stride", f"{groups} groups")}
        if groups == inputs:
            found.add(("not_depthwise", f"{groups} groups of one channel"))
    elif stride >= _LONG:
        found.add(("short_last_stride", f"stride {stride} along the last axis"))
    return frozenset(found)


def _of_mean(node: fx.Node) -> frozenset[tuple[str, str]]:
    axes: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    axes = (axes,) if isinstance(axes, int) else axes
    if isinstance(axes, (list, tuple)) and tuple(sorted(axes)) in _INNER:
        return frozenset()
    told = "all axes" if axes is None else f"axes {', '.join(map(str, axes))}"
    return frozenset({("inner_axes", f"mean over {told}")})


def _geometry(node: fx.Node, graph: GraphIndex) -> tuple[int, int, int]:
    """Of a convolution: groups, channels of the input, the last stride; (1, 0, 1) of everything else."""
    if node.op == "call_module":
        module = graph.module_of(node)
        parts = () if module is None else module.modules()
        conv: Any = next((part for part in parts if isinstance(part, _MODULES)), None)
        return (1, 0, 1) if conv is None else (conv.groups, conv.in_channels, conv.stride[-1])
    if node.target not in (*_CONVS, *_TRANSPOSED):
        return 1, 0, 1
    stride = _argument(node, _STRIDE, "stride")
    last = stride[-1] if isinstance(stride, (list, tuple)) else stride
    last = last if isinstance(last, int) else 1
    groups = _argument(node, _GROUPS, "groups")
    if not isinstance(groups, int):
        return 1, 0, last
    weight = node.kwargs.get("weight", node.args[1] if len(node.args) > 1 else None)
    return groups, _channels(weight, groups, graph, node.target in _TRANSPOSED), last


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else 1)


def _channels(weight: Any, groups: int, graph: GraphIndex, transposed: bool) -> int:
    """Channels of the input, by the shape of a weight that the graph holds; else 0."""
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return 0
    path, _, name = str(weight.target).rpartition(".")
    shape = getattr(graph.modules[path], name).shape
    return int(shape[0] if transposed else shape[1] * groups)
