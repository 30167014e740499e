"""Steps that scale channels: the module that makes a channel is divided, and the weights that read it are
multiplied, by the same factor.

The float model computes the same as before. It can be quantized better: channels of similar size lose less
when they share one range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from backquant.accuracy.recipes.bench import Bench
from backquant.accuracy.recipes.draft import (
    Change,
    Draft,
    Layer,
    Together,
    layers_of,
)
from backquant.accuracy.recipes.ranges import heads_by_value, observed_ranges, over_range, rounded
from backquant.accuracy.rounding import Grid, columns, positions
from backquant.accuracy.twin import Twin
from backquant.dtypes import ObservedQParams, block_of
from backquant.graph import GraphIndex, get_module
from backquant.graph.edit import weighted_part
from backquant.observe.protocol import measure
from backquant.operators import find
from backquant.prepare import prepared_state
from backquant.prepare.sites import ObserverSource

# Values whose channels can be scaled: one module makes the value, and only layers with weights read it.
#
# The operators between them must pass a positive factor on a channel through unchanged: their records say so
# (``Operator.homogeneous``), the names of modules do not matter.

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


_ROWS = 1024  # inputs of a layer that are looked at, of all batches
_MOST = 1e4  # of a factor, and one by it the least
_ROUNDS = 20
_LESS = 0.98  # of the error, and a factor is worth its change
_ENOUGH = 256  # values of a channel: the largest of fewer says little of what is to come, which is clipped
_MUCH_LESS = 0.3  # the same where it takes an operator out of a kernel
_STRENGTHS = (0.25, 0.5, 0.75)
_PRODUCTS = (0.4, 0.5, 0.65, 0.8)
_AWQ_STRENGTHS = tuple(step / 10 for step in range(1, 11))


@dataclass
class _Seen:
    """A ``Bridge`` on the calibration data: the largest and the mean absolute value of each channel, and
    inputs of the layers that read it, ``(groups, rows, columns)``.
    """

    largest: Tensor
    total: Tensor
    count: int = 0
    rows: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def mean(self) -> Tensor:
        return self.total / max(self.count, 1)


class _Chosen(NamedTuple):
    """What the channels of a bridge are divided by; ``seen``: where its readers were looked at."""

    bridge: Bridge
    factor: Tensor
    seen: _Seen | None = None


def equalization(draft: Draft, bench: Bench) -> Iterator[Together]:
    """Cross-layer equalization: for each channel, the weights that make it and the weights that read it get
    the same range.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019
    (arXiv 1906.04721), equation 11, repeated over all pairs until nothing changes.
    """
    twin = draft.twin()
    found = [bridge for bridge in bridges_of(twin) if bridge.layer is not None]
    factors = equalized(found)
    yield from _proposed(draft, bench, twin, list(map(_Chosen, found, factors)))


def equalized(bridges: list[Bridge]) -> list[Tensor]:
    """What the channels of each are divided by."""
    weights: dict[str, Tensor] = {}
    for bridge in bridges:
        for layer in (bridge.layer, *bridge.readers):
            assert layer is not None
            weights[layer.path] = columns(layer.weight, layer.groups).clone()
    factors = [bridge.each(1.0) for bridge in bridges]
    for _ in range(_ROUNDS):
        furthest = 0.0
        for place, bridge in enumerate(bridges):
            made = weights[bridge.source].abs().amax(-1).flatten()
            read = _read_largest(bridge, weights)
            factor = _factor((made / read).sqrt())
            weights[bridge.source] /= factor.reshape((*weights[bridge.source].shape[:2], 1))
            for layer in bridge.readers:
                weights[layer.path] *= _spread(factor, layer)
            factors[place] = factors[place] * factor
            furthest = max(furthest, float((factor.log().abs()).max()))
        if furthest < 1e-3:
            break
    return factors


def smoothquant(draft: Draft, bench: Bench) -> Iterator[Together]:
    """Divide the large channels of activations, also behind norms, and multiply the weights that read them.
    Of several strengths the one is taken with which these layers have the least error, with activations
    and weights rounded.

    Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
    Models", 2022 (arXiv 2211.10438), equation 4.
    """

    def candidates(seen: _Seen, read: Tensor) -> Iterator[Tensor]:
        for strength in _STRENGTHS:
            yield smoothed(seen.largest, read, strength)

    yield from _chosen(draft, bench, candidates)


def products(draft: Draft, bench: Bench) -> Iterator[Together]:
    """SmoothQuant for values that no weights make, or that other operators read, too: a multiplication before
    the layers scales them. This is the only step that adds operators; each of them reads and writes the
    value once more.

    An activation function that is fused into a layer's kernel runs in float after it then: such a
    multiplication has to leave less than a third of the error of the layers that read the value. Channels
    of which few values are known are not scaled: what is new is clipped.
    """

    def candidates(seen: _Seen, read: Tensor) -> Iterator[Tensor]:
        if seen.count < _ENOUGH * len(seen.rows):
            return
        for strength in _PRODUCTS:
            factor = smoothed(seen.largest, read, strength)
            yield factor / factor.log().mean().exp()

    yield from _chosen(draft, bench, candidates, products_of)


def smoothed(largest: Tensor, weights: Tensor, strength: float) -> Tensor:
    """Equation 4: from the largest values of each channel and the largest weights that read it.

    >>> smoothed(torch.tensor([100.0, 1.0]), torch.tensor([1.0, 1.0]), 0.5)
    tensor([10.,  1.])
    """
    return _factor(largest**strength / weights ** (1 - strength))


def awq(draft: Draft, bench: Bench) -> Iterator[Together]:
    """Weights that read large channels get a finer grid: channels are divided by a power of their mean size,
    the one with which the layers that read them err least.

    Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023
    (arXiv 2306.00978), equations 4 and 5.
    """

    def candidates(seen: _Seen, _: Tensor) -> Iterator[Tensor]:
        for strength in _AWQ_STRENGTHS:
            factor = _factor(seen.mean**strength)
            yield factor / (factor.max() * factor.min()).sqrt()

    yield from _chosen(draft, bench, candidates)


def _factor(x: Tensor) -> Tensor:
    """Where there is nothing to compare, nothing is scaled."""
    usable = torch.isfinite(x) & (x > 0)
    return torch.where(usable, x, torch.ones_like(x)).clamp(1 / _MOST, _MOST)


def _weights(bridge: Bridge) -> dict[str, Tensor]:
    return {layer.path: columns(layer.weight, layer.groups) for layer in bridge.readers}


def _read_largest(bridge: Bridge, weights: Mapping[str, Tensor]) -> Tensor:
    """The largest weight by which each channel is read."""
    found = []
    for layer in bridge.readers:
        inputs = layer.weight.shape[1]
        rows = weights[layer.path].abs().amax(1).reshape(layer.groups, inputs, -1)
        found.append(rows.amax(-1).flatten())
    return torch.stack(found).amax(0)


def _spread(factor: Tensor, layer: Layer) -> Tensor:
    """``(groups, 1, columns)``: the factor of the channel that each column reads."""
    inputs = layer.weight.shape[1]
    taps = columns(layer.weight, layer.groups).shape[-1] // inputs
    return factor.reshape(layer.groups, 1, inputs).repeat_interleave(taps, -1)


def _chosen(
    draft: Draft,
    bench: Bench,
    candidates: Callable[[_Seen, Tensor], Iterable[Tensor]],
    found: Callable[[Twin], Iterable[Bridge]] = bridges_of,
) -> Iterator[Together]:
    """The factors with which the readers of each bridge err least, where any helps."""
    twin = draft.twin()
    bridges = list(found(twin))
    ranges = _activations(twin, bridges)
    chosen = []
    for bridge, seen in zip(bridges, _looked_at(bench, twin, bridges), strict=True):
        enough = _MUCH_LESS if bridge.parts else _LESS
        least, best = enough * _error(bridge, seen, bridge.each(1.0), ranges), None
        for factor in candidates(seen, _read_largest(bridge, _weights(bridge))):
            error = _error(bridge, seen, factor, ranges)
            if error < least:
                least, best = error, factor
        if best is not None:
            chosen.append(_Chosen(bridge, best, seen))
    yield from _proposed(draft, bench, twin, chosen)


def _looked_at(bench: Bench, twin: Twin, bridges: list[Bridge]) -> list[_Seen]:
    readers: dict[str, list[tuple[int, Layer]]] = {}
    for place, bridge in enumerate(bridges):
        for layer in bridge.readers:
            readers.setdefault(layer.nodes[0].name, []).append((place, layer))
    seen = [_Seen(each.each(0.0), each.each(0.0)) for each in bridges]
    many = max(1, _ROWS // max(1, len(bench.fitting)))
    for walk in bench.walks(twin, lambda _: False):
        for position, node in enumerate(twin.nodes):
            walk.to(position)
            for place, layer in readers.get(node.name, ()):
                args, kwargs = walk.inputs_of(node)
                x = args[0] if args else next(iter(kwargs.values()))
                _look(seen[place], layer, x.float(), bridges[place].axis, many)
    return seen


def _look(seen: _Seen, layer: Layer, x: Tensor, axis: int, many: int) -> None:
    sizes = x.movedim(axis, 0).unsqueeze(-1).flatten(1).abs()
    seen.largest = torch.maximum(seen.largest, sizes.amax(1))
    seen.total, seen.count = seen.total + sizes.sum(1), seen.count + sizes.shape[1]
    samples = x[:4] if x.dim() > -axis and axis < -1 else x
    rows = positions(layer.float_part, samples)
    seen.rows.setdefault(layer.path, []).append(rows[:, :: max(1, rows.shape[1] // many)])


def _activations(twin: Twin, bridges: list[Bridge]) -> dict[str, ObservedQParams]:
    """How the input of each reader is quantized, where that is measured in calibration."""
    ranges = observed_ranges(twin)
    heads = heads_by_value(twin, ranges)
    found = {}
    for bridge in bridges:
        for layer in bridge.readers:
            for source in layer.nodes[0].all_input_nodes[:1]:
                for head in heads.get(source.name, ())[:1]:
                    found[layer.path] = ranges[head]
    return found


def _error(
    bridge: Bridge, seen: _Seen, factor: Tensor, ranges: Mapping[str, ObservedQParams]
) -> float:
    """The error of the readers' outputs, each relative to its own size, with inputs and weights rounded
    to nearest; ``ranges``, by the path of a reader, become as wide as what was seen is then.
    """
    total = 0.0
    for layer in bridge.readers:
        scaled, activation = _scaled(seen, factor, layer), ranges.get(layer.path)
        if activation is not None:
            activation = over_range(activation, float(scaled.min()), float(scaled.max()))
        total += _error_of(seen, factor, layer, scaled, activation)
    return total


def _scaled(seen: _Seen, factor: Tensor, layer: Layer) -> Tensor:
    return torch.cat(seen.rows[layer.path], 1) / _spread(factor, layer)


def _error_of(
    seen: _Seen, factor: Tensor, layer: Layer, scaled: Tensor, activation: ObservedQParams | None
) -> float:
    weight, spread = columns(layer.weight, layer.groups), _spread(factor, layer)
    wanted = torch.cat(seen.rows[layer.path], 1) @ weight.mT
    if activation is not None:
        scaled = rounded(scaled, activation)
    made = _regrid(layer, weight * spread).nearest(weight * spread)
    error = (scaled @ made.mT - wanted).double().pow(2).sum()
    return float(error / wanted.double().pow(2).sum().clamp(min=1e-20))


def _regrid(layer: Layer, weight: Tensor) -> Grid:
    """The scales of a layer whose weight has become ``weight``: each follows the largest weight that shares
    it.
    """
    grid = layer.grid()
    before = _shared_largest(layer, columns(layer.weight, layer.groups))
    after = _shared_largest(layer, weight)
    ratio = torch.where(before > 0, after / before.clamp(min=1e-30), torch.ones_like(after))
    return replace(grid, scale=grid.scale * ratio.clamp(min=1e-12))


def _shared_largest(layer: Layer, weight: Tensor) -> Tensor:
    """For each weight the largest of those that share its scale."""
    scale: Tensor = layer.reference.weight_scale
    size = weight.abs()
    block = block_of(layer.weight.shape, scale.shape) if scale.dim() > 1 else None
    if block is not None and block[0] == 1 and weight.shape[0] == 1:
        width = weight.shape[-1] * block[1] // layer.weight.shape[1]
        padded = torch.nn.functional.pad(size, (0, -size.shape[-1] % width))
        largest = padded.unflatten(-1, (-1, width)).amax(-1).repeat_interleave(width, -1)
        found: Tensor = largest[..., : size.shape[-1]]
        return found
    if scale.numel() == 1:
        return size.amax().expand(size.shape)
    return size.amax(-1, keepdim=True).expand(size.shape)


def _proposed(
    draft: Draft, bench: Bench, twin: Twin, chosen: Sequence[_Chosen]
) -> Iterator[Together]:
    """The changes of each bridge with its new ranges, which are measured anew."""
    usable = []
    for one in chosen:
        heads = observers_of(one.bridge, twin)
        same = torch.allclose(one.factor, torch.ones_like(one.factor), rtol=1e-3)
        if heads is not None and not same:
            usable.append((one, heads))
    measured = _measured(draft, bench, twin, usable)
    for one, heads in usable:
        bridge, own = one.bridge, [head for head in heads if head in measured]
        found = [Change(head, activation=_range(one, head, measured[head])) for head in own]
        read = [Change(layer.path, multiplied=one.factor) for layer in bridge.readers]
        yield (Change(bridge.source, divided=one.factor), *read, *found)


def _range(one: _Chosen, head: str, observer: nn.Module) -> ObservedQParams:
    """The range that ``observer`` gives; before a multiplication, the whole range that it saw, where that has
    the smaller error: a histogram cuts off rare values, which may belong to a token that all the others
    attend to.
    """
    said = measure(observer)
    low, high = (getattr(observer, name, None) for name in ("min_val", "max_val"))
    if (
        one.seen is None
        or head != one.bridge.source
        or said.scale is None
        or said.scale.numel() != 1
    ):
        return said
    if low is None or high is None or low.numel() != 1:
        return said
    whole = over_range(said, float(low), float(high))
    errors = [0.0, 0.0]
    for layer in one.bridge.readers:
        scaled = _scaled(one.seen, one.factor, layer)
        for place, activation in enumerate((said, whole)):
            errors[place] += _error_of(one.seen, one.factor, layer, scaled, activation)
    return whole if errors[1] < errors[0] else said


def _measured(
    draft: Draft, bench: Bench, twin: Twin, chosen: list[tuple[_Chosen, tuple[str, ...]]]
) -> dict[str, nn.Module]:
    """New observers of the kinds that are there, which have seen the scaled values of all batches."""
    record = prepared_state(draft.prepared)
    source = ObserverSource(record.backend_config, record.qconfig_mapping)
    ranges = observed_ranges(twin)
    groups: dict[str, list[str]] = {}
    for site in twin.record.sites.sites:
        groups.setdefault(site.group, []).append(site.value)
    observers: dict[str, nn.Module] = {}
    wanted: dict[str, list[tuple[str, Tensor]]] = {}
    for one, heads in chosen:
        by = one.factor.reshape(-1, *[1] * (-1 - one.bridge.axis))
        for head in (head for head in heads if head in ranges):
            observers[head] = source.make(record.sites[head].spec).to(one.factor.device)
            for value in groups[head]:
                wanted.setdefault(value, []).append((head, by))
    if not observers:
        return {}
    for walk in bench.walks(twin, lambda _: False, bench.held):
        for position in range(len(twin.nodes)):
            walk.to(position + 1)
            name = twin.nodes[position].name
            for head, by in wanted.get(name, ()):
                observers[head](walk.values[name] / by)
    return observers
