"""Layers that read what is scaled sample by sample: ``layer(x / r) * r``.

``r`` is the largest value of a sample. In float that is what the layer gives. On integers ``x / r`` fills its
range whatever the sample: one static range then holds a whisper as it holds a shout.

Where the results of a layer are rounded, too, its channels can be divided by their largest values, which the
same product takes back: each channel then has a range of its own.
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
    than once, or are no plain layers, stay as they are.

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
            value: Any = node.args[0]
            if value not in read:
                read[value] = _divided(captured, node, layers[node.name].axes)
            _scale(captured, node, *read[value], layers[node.name].channels)
            found.append(str(node.target))
    if found:
        captured.module.recompile()
    return tuple(found)


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
    axes = _axes(layer)
    readers = list(node.users)
    norm: Any = None
    if len(readers) == 1 and readers[0].op == "call_module":
        norm = get_module(module, str(readers[0].target))
    if type(norm) in _NORMS and norm.running_mean is not None:
        bias = torch.zeros_like(norm.running_mean) if layer.bias is None else layer.bias
        with torch.no_grad():  # what a norm makes of a layer that gives its bias
            constant = norm(bias.reshape(1, *axes))[0]
        return readers[0], constant
    if layer.bias is None:
        return node, None
    constant = layer.bias.detach().reshape(axes)
    layer = shallow_copy(layer)
    layer.bias = None
    set_module(module, str(node.target), layer)
    return node, constant
