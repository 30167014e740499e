"""Layers that read what is scaled sample by sample: ``layer(x / r) * r``.

``r`` is the largest value of a sample. In float that is what the layer gives. On integers ``x / r`` fills its
range whatever the sample: one static range then holds a whisper as it holds a shout.

Where the results of a layer are rounded, too, its channels can be divided by their largest values, which the
same product takes back: each channel then has a range of its own.

Where the channels of an input differ in size from sample to sample, too (the low and the high tones of a
sound), they can be divided into parts: ``a(x1 / r1) * r1 + b(x2 / r2) * r2``, with half of the weights each.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from backquant.graph import Captured, Scope, get_module, set_module, shallow_copy
from backquant.match.plan import BySample

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: Layers that this can be done to: linear in a sample, apart from their bias.
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LEAST = 1e-12  # of what is divided by: a sample of zeros stays one


def scaled_by_sample(captured: Captured, layers: Mapping[str, BySample]) -> tuple[str, ...]:
    """Scale, in place, what layers of ``captured`` read, and scale what they give back.

    A batch norm that alone reads a layer stays with it. ``layers``: by name of their nodes; the first of the
    axes is that of samples (all are one sample where there are less). Layers that read
    the same value share what it is divided by. Returns the paths of the modules; those that are called more
    than once, or are no plain layers, stay as they are. Layers with groups of channels, and those that a norm
    stays with, are not divided into parts.

    >>> from backquant.graph import capture
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> captured = capture(model)
    >>> scaled_by_sample(captured, {"_0": BySample(2)})
    ('0',)
    >>> [node.name for node in captured.module.graph.nodes if node.op.startswith("call")]
    ['abs_1', 'amax', 'clamp', 'truediv', '_0', 'mul', 'add']
    >>> x = torch.tensor([[1e-6, 2e-6], [3.0, 4.0]])
    >>> torch.allclose(captured.module(x), model(x))
    True
    """
    graph, found = captured.module.graph, []
    read: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    for node in list(graph.nodes):
        if node.name not in layers or node.op != "call_module" or calls[str(node.target)] > 1:
            continue
        if type(get_module(captured.module, str(node.target))) in LAYERS:
            how = layers[node.name]
            for part in _parted(captured, node, how.parts):
                value: Any = part.args[0]
                if value not in read:
                    read[value] = _divided(captured, part, how.axes)
                _scale(captured, part, *read[value], how.channels)
            found.append(str(node.target))
    if found:
        captured.module.recompile()
    return tuple(found)


def part_name(node: str, place: int) -> str:
    """What the node of a part is called, and its module at the end: the first is the layer's own.

    >>> part_name("conv1", 0), part_name("conv1", 1)
    ('conv1', 'conv1_part_1')
    """
    return f"{node}_part_{place}" if place else node


def _parted(captured: Captured, node: fx.Node, parts: int) -> list[fx.Node]:
    """``node``, or the layers that read parts of its input channels, the first of which it becomes; their sum
    is in its place."""
    module, graph = captured.module, captured.module.graph
    path = str(node.target)
    layer: Any = get_module(module, path)
    count = layer.weight.shape[input_axis(layer)]
    if parts < 2 or count < parts or getattr(layer, "groups", 1) > 1 or _norm(module, node):
        return [node]
    scope = captured.scopes.get(node.name, Scope(path, type(layer)))
    value, readers, made, total = node.args[0], list(node.users), [node], node
    for place in range(parts):
        own = slice(count * place // parts, count * (place + 1) // parts)
        set_module(module, part_name(path, place), _of_channels(layer, own))
        with graph.inserting_before(node):
            axes: Any = (..., own, *[slice(None)] * (layer.weight.dim() - 2))
            cut = graph.call_function(operator.getitem, (value, axes))
        _belong(captured, node, (cut,))
        if not place:
            node.update_arg(0, cut)
            continue
        name, target = part_name(node.name, place), part_name(path, place)
        with graph.inserting_before(total.next):
            total_before, own_part = (
                total,
                graph.create_node("call_module", target, (cut,), name=name),
            )
            total = graph.call_function(operator.add, (total_before, own_part))
        captured.scopes[name] = Scope(part_name(scope.path, place), type(layer))
        _belong(captured, node, (total,))
        made.append(own_part)
    for reader in readers:
        reader.replace_input_with(node, total)
    return made


def _of_channels(layer: Any, own: slice) -> Any:
    """``layer`` for these of its input channels; the first of them have the bias."""
    made: Any = shallow_copy(layer)
    at = input_axis(layer)
    weight = layer.weight.detach().narrow(at, own.start, own.stop - own.start)
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.bias = None if own.start else layer.bias
    name = "in_features" if isinstance(layer, nn.Linear) else "in_channels"
    setattr(made, name, own.stop - own.start)
    return made


def input_axis(layer: Any) -> int:
    """The axis of a layer's weight that is that of its input channels.

    >>> input_axis(nn.Conv1d(2, 4, 3)), input_axis(nn.ConvTranspose1d(2, 4, 3))
    (1, 0)
    """
    return 0 if isinstance(layer, _TRANSPOSED) else 1


def _divided(captured: Captured, node: fx.Node, rank: int) -> tuple[fx.Node, fx.Node]:
    """The largest value of each sample of what ``node`` reads, and these samples divided by it."""
    graph, value = captured.module.graph, node.args[0]
    with graph.inserting_before(node):
        size = graph.call_function(torch.abs, (value,))
        largest = graph.call_function(torch.amax, (size, list(range(1 - rank, 0)), True))
        divisor = graph.call_function(torch.clamp, (largest,), {"min": _LEAST})
        divided = graph.call_function(operator.truediv, (value, divisor))
    _belong(captured, node, (size, largest, divisor, divided))
    return divisor, divided


def _belong(captured: Captured, node: fx.Node, made: Iterable[fx.Node]) -> None:
    """What was made for ``node`` is where ``node`` is in the model."""
    own = captured.scopes.get(node.name, Scope("", None))
    captured.scopes.update((one.name, Scope(own.parent, None)) for one in made)


def _scale(
    captured: Captured,
    node: fx.Node,
    divisor: fx.Node,
    divided: fx.Node,
    channels: tuple[float, ...],
) -> None:
    module, graph = captured.module, captured.module.graph
    path = str(node.target).replace(".", "_")
    node.update_arg(0, divided)
    last, constant = _affine(module, node)
    readers, made = list(last.users), list[fx.Node]()

    def read(name: str, tensor: torch.Tensor) -> fx.Node:
        module.register_buffer(f"{path}_{name}", tensor)
        made.append(graph.get_attr(f"{path}_{name}"))
        return made[-1]

    def call(target: Any, *args: fx.Node) -> fx.Node:
        made.append(graph.call_function(target, args))
        return made[-1]

    following = last.next
    with graph.inserting_before(following):
        result, by, held = last, divisor, constant
        if channels:
            sizes = torch.tensor(channels).reshape(_axes(get_module(module, str(node.target))))
            _divide(module, last, sizes.flatten())
            by = call(operator.mul, divisor, read("channels", sizes))
            held = None if constant is None else constant / sizes
        if held is not None and last is not node:
            result = call(operator.sub, last, read("held", held))
        result = call(operator.mul, result, by)
        if constant is not None:
            result = call(operator.add, result, read("constant", constant))
    for reader in readers:
        reader.replace_input_with(last, result)
    _belong(captured, node, made)


def _divide(module: fx.GraphModule, last: fx.Node, sizes: torch.Tensor) -> None:
    """Divide the output channels of a layer, or of the norm behind it, by ``sizes``."""
    part: Any = shallow_copy(get_module(module, str(last.target)))
    if type(part) in _NORMS:
        weight, bias = part.weight, part.bias
        whole = torch.ones_like(sizes) if weight is None else weight.detach()
        added = torch.zeros_like(sizes) if bias is None else bias.detach()
        part.weight = nn.Parameter(whole / sizes, requires_grad=False)
        part.bias = nn.Parameter(added / sizes, requires_grad=False)
        part.affine = True
    else:
        weight = part.weight.detach()
        if isinstance(part, _TRANSPOSED):
            outputs = sizes.reshape(part.groups, 1, -1, *[1] * (weight.dim() - 2))
            made = weight.reshape(part.groups, -1, *weight.shape[1:]) / outputs
            weight = made.reshape(weight.shape)
        else:
            weight = weight / sizes.reshape(-1, *[1] * (weight.dim() - 1))
        part.weight = nn.Parameter(weight, requires_grad=False)
    set_module(module, str(last.target), part)


def _axes(layer: Any) -> tuple[int, ...]:
    """The shape of what is one number for each output channel."""
    return (-1,) if isinstance(layer, nn.Linear) else (-1, *(1,) * (layer.weight.dim() - 2))


def _affine(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, torch.Tensor | None]:
    """The last operator of the layer, and what it adds whatever the sample: its bias, which is taken out of
    the layer unless a batch norm follows.
    """
    layer: Any = get_module(module, str(node.target))
    axes, norm = _axes(layer), _norm(module, node)
    if norm is not None:
        bias = torch.zeros_like(norm.running_mean) if layer.bias is None else layer.bias
        with torch.no_grad():  # what a norm makes of a layer that gives its bias
            constant = norm(bias.reshape(1, *axes))[0]
        return next(iter(node.users)), constant
    if layer.bias is None:
        return node, None
    constant = layer.bias.detach().reshape(axes)
    layer = shallow_copy(layer)
    layer.bias = None
    set_module(module, str(node.target), layer)
    return node, constant


def _norm(module: fx.GraphModule, node: fx.Node) -> Any:
    """The batch norm that alone reads a layer, and has statistics."""
    readers = list(node.users)
    if len(readers) != 1 or readers[0].op != "call_module":
        return None
    found: Any = get_module(module, str(readers[0].target))
    return found if type(found) in _NORMS and found.running_mean is not None else None
