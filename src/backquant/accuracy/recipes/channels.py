"""Values whose channels can be scaled: one module makes the value, and only layers with weights read it.

The operators between them must pass a positive factor on a channel through unchanged: their records say so
(``Operator.homogeneous``), the names of modules do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from backquant.accuracy.recipes.draft import weighted_part
from backquant.accuracy.recipes.layers import Layer, layers_of
from backquant.accuracy.twin import Twin
from backquant.graph import GraphIndex, get_module
from backquant.operators import find

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_OUTPUTS = 256  # that a linear layer sums of each input, and a product with that input is little
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Bridge:
    """A value whose channels can be scaled.

    ``source``: the path of the module whose output channels they are. ``axis``: the axis of the channels,
    counted from the last. ``layer``: the source, where it is a linear layer or a convolution. ``values``: the
    nodes that carry the channels. ``parts``: whether scaling takes an operator out of the kernel that it is
    fused into.
    """

    source: str
    axis: int
    channels: int
    layer: Layer | None
    values: tuple[str, ...]
    readers: tuple[Layer, ...]
    parts: bool = False

    def each(self, value: float) -> torch.Tensor:
        """``value`` for each channel, on the device of the layers."""
        device = self.readers[0].weight.device if self.readers else None
        return torch.full((self.channels,), value, device=device)


def bridges_of(twin: Twin) -> Iterator[Bridge]:
    """Every ``Bridge`` of a draft, in the order of its graph."""
    layers = {each.nodes[0].name: each for each in layers_of(twin) if len(each.nodes) == 1}
    index = GraphIndex(twin.float_graph)
    calls: dict[str, int] = {}
    for node in twin.nodes:
        calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    for node in twin.nodes:
        if node.op != "call_module" or calls[str(node.target)] > 1:
            continue
        module = get_module(twin.float_graph, str(node.target))
        part: Any = weighted_part(module)
        axis = _channel_axis(part)
        rest = list(module)[1:] if isinstance(module, nn.Sequential) else []
        if axis is None or not all(_is_homogeneous(type(each)) for each in rest):
            continue
        carried, readers = _followed(node, axis, layers, index)
        channels = part.weight.shape[0]
        if readers and all(_inputs(each) == channels for each in readers):
            layer = layers.get(node.name)
            values = tuple(value.name for value in carried)
            yield Bridge(str(node.target), axis, channels, layer, values, tuple(readers))


def _channel_axis(part: Any) -> int | None:
    """The channel axis of what a module returns, counted from behind; ``None`` if its channels cannot be
    scaled.
    """
    if not isinstance(getattr(part, "weight", None), torch.Tensor):
        return None
    if isinstance(part, nn.Linear):
        return -1
    if isinstance(part, nn.LayerNorm | nn.RMSNorm):
        return -1 if part.weight.dim() == 1 else None
    for dimensions, kinds in enumerate(zip(_CONVOLUTIONS, _NORMS, strict=True), 1):
        if isinstance(part, kinds):
            return -1 - dimensions
    return None


def _is_homogeneous(op: Any) -> bool:
    known = find(op)
    return known is not None and known.homogeneous


def _inputs(layer: Layer) -> int:
    return int(layer.weight.shape[1]) * layer.groups


def _followed(
    source: fx.Node, axis: int, layers: dict[str, Layer], index: GraphIndex
) -> tuple[list[fx.Node], list[Layer]]:
    """The nodes that carry the channels, and the layers that read them; nothing where another operator reads
    them, too.
    """
    carried, readers = {source: None}, []
    waiting = [source]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            layer = layers.get(user.name)
            if layer is not None and _channel_axis(layer.float_part) == axis:
                readers.append(layer)
            elif _passes_on(user, axis, index):
                if user not in carried:
                    carried[user] = None
                    waiting.append(user)
            else:
                return [], []
    products = (
        node for node in carried if len(node.all_input_nodes) > 1 or _is_product(node, index)
    )
    once = all(sum(arg in carried for arg in _arguments(node)) == 1 for node in products)
    return (list(carried), readers) if once else ([], [])


def _arguments(node: fx.Node) -> list[Any]:
    return [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)]


def _is_product(node: fx.Node, index: GraphIndex) -> bool:
    key = index.key(node)
    known = None if key is None else find(key.op)
    return known is not None and known.name == "mul"


def _passes_on(node: fx.Node, axis: int, index: GraphIndex) -> bool:
    """Whether a positive factor on a channel of the input is that factor on this channel of the output."""
    key = index.key(node)
    known = None if key is None else find(key.op)
    if known is None:
        return False
    if known.name == "mul":  # whatever the other factor is, on the last axis
        return axis == -1
    if known.name == "prelu":  # its own channels are those of axis 1
        return axis != -1
    return known.homogeneous and (axis != -1 or known.family != "pooling")


def products_of(twin: Twin) -> Iterator[Bridge]:
    """Values that are quantized for linear layers alone, so that a multiplication before them could scale
    their channels; ``source`` is their observer.

    Left out are values that a ``Bridge`` scales at no cost, and values that so few outputs read that the
    multiplication would take as long as the layer.
    """
    layers = {each.nodes[0].name: each for each in layers_of(twin) if len(each.nodes) == 1}
    scaled = {value for bridge in bridges_of(twin) for value in bridge.values}
    nodes = {node.name: node for node in twin.nodes}
    groups = twin.record.sites.groups()
    for site in twin.record.sites.sites:
        readers = [layers.get(name) for name in site.readers]
        found = [each for each in readers if each is not None and _reads(each, site.value)]
        node = nodes.get(site.value)
        if site.producer or node is None or len(groups[site.group]) > 1 or site.value in scaled:
            continue
        if any(read.op == "get_attr" for read in node.all_input_nodes):
            continue  # scaled by a constant already
        channels = {_inputs(each) for each in found}
        outputs = sum(int(each.weight.shape[0]) for each in found)
        if len(found) == len(readers) and len(channels) == 1 and outputs >= _OUTPUTS:
            parts, own = _follows_a_kernel(node, twin), (site.value,)
            yield Bridge(site.name, -1, channels.pop(), None, own, tuple(found), parts)


def _reads(layer: Layer, value: str) -> bool:
    is_linear = isinstance(layer.float_part, nn.Linear)
    return is_linear and [node.name for node in layer.nodes[0].all_input_nodes] == [value]


def _follows_a_kernel(node: fx.Node, twin: Twin) -> bool:
    """Whether it is an operator whose only input is the result of a quantized one, as an activation after a
    layer.
    """
    reads = node.all_input_nodes
    return len(reads) == 1 and reads[0].name in twin.of


def observers_of(bridge: Bridge, twin: Twin) -> tuple[str, ...] | None:
    """The heads of the observers of its values; ``None`` where one of them observes others, too."""
    own = frozenset(bridge.values)
    sites = twin.record.sites.sites
    heads = dict.fromkeys(site.group for site in sites if site.value in own)
    shared = any(site.group in heads and site.value not in own for site in sites)
    return None if shared else tuple(heads)
