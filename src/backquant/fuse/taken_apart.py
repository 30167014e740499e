"""Layers that are taken apart before fusing: attention, recurrent layers, inputs scaled sample by sample."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.backend_config import BackendConfig
from backquant.graph import (
    Captured,
    GraphRewriter,
    Scope,
    get_module,
    reshape_views,
    set_module,
    shallow_copy,
)
from backquant.graph.shapes import GraphValues
from backquant.graph.tracer import Held, add_checks
from backquant.match.conditions import as_products
from backquant.match.plan import BySample
from backquant.match.rules import QConfigReader, RuleTable
from backquant.operators.computed_once import computed_once
from backquant.qconfig import QConfigMapping

# Attention as the operators that it stands for, where a mapping asks for its products.
#
# ``F.scaled_dot_product_attention`` is one operator, and no kernel on integers computes it. A target whose
# ``QDQRules.attention`` is ``"products"`` has integer matrix products: there it becomes ``matmul``,
# ``mul``, ``softmax`` and ``matmul``, each with its own entry.
#
# Source: PyTorch documentation, ``torch.nn.functional.scaled_dot_product_attention`` (its equivalent in
# Python).


def decompose_attention(
    captured: Captured, backend: BackendConfig, mapping: QConfigMapping, example_inputs: Any = None
) -> None:
    """Write the attention of ``captured`` apart, in place, where ``mapping`` asks for integer products.

    It does where the mapping has a QConfig for ``torch.matmul`` at that place. ``None`` for
    ``F.scaled_dot_product_attention`` itself leaves it whole, and so do dropout, shared heads, and masks
    that may be added (masks of bools are recognised by the node that makes them, or as constants).

    The scale is a number where ``example_inputs`` show the width of a head and it was not declared free; the
    graph then raises at a call with another one.

    >>> from backquant.backend_config import QDQRules
    >>> from backquant.graph import capture
    >>> from backquant.qconfig import get_default_qconfig
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return F.scaled_dot_product_attention(q, k, v)
    >>> captured = capture(Attention())
    >>> mapping = QConfigMapping().set_global(get_default_qconfig("x86"))
    >>> decompose_attention(captured, BackendConfig("b").set_qdq(QDQRules(attention="products")), mapping)
    >>> [node.name for node in captured.module.graph.nodes if node.op != "placeholder"]
    ['size', 'pow_1', 'transpose', 'matmul', 'mul', 'softmax', 'matmul_1', 'output']
    """
    if backend.qdq is None or backend.qdq.attention == "whole":
        return
    table, reader = RuleTable(mapping), QConfigReader()
    values = GraphValues(captured.module, example_inputs, captured.free)
    held: dict[fx.Node, Held] = {}

    def products(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
        given, scope = as_products(node), write.scopes.get(node.name, Scope("", None))
        is_meant = given is not None and _is_requested(table, reader, scope)
        if given is None or not is_meant:
            return None
        call = partial(write.call, node)
        if given.get("scale") is None:
            given["scale"] = _score_scale(call, given["query"], values, held)
        return _products(call, **given)

    if GraphRewriter(captured.module, captured.scopes).apply(products):
        checks = add_checks(captured.module.graph, held)
        captured.scopes.update({new.name: captured.scopes[size.name] for size, new in checks})
        # the operator lays heads inside of positions, a product does not
        reshape_views(captured.module.graph)
        computed_once(captured.module, captured.scopes)  # scores that two attentions share
        captured.module.recompile()


def _is_requested(table: RuleTable, reader: QConfigReader, scope: Scope) -> bool:
    whole = table.by_type(F.scaled_dot_product_attention)
    if whole is not None and whole.qconfig is None:
        return False
    hit = table.by_name(scope.path)
    if hit is None and scope.module_type is not None:
        hit = table.by_type(scope.module_type)
    hit = hit or table.by_type(torch.matmul) or table.fallback
    request = reader.activation(hit.qconfig, str(hit.rule))
    return request is not None and not request.is_dynamic and not request.dtype.is_floating_point


def _score_scale(
    call: Callable[..., fx.Node], query: fx.Node, values: GraphValues, held: dict[fx.Node, Held]
) -> fx.Node | float:
    """What scores are multiplied with; ``held`` gets the size that makes it a number."""
    facts, width = values.of(query.name), call("size", query, -1)
    if facts is None or len(facts.shape) - 1 in facts.free:
        return call(operator.pow, width, -0.5)
    held[width] = Held(facts.shape[-1], "")
    return float(facts.shape[-1] ** -0.5)


def _products(
    call: Callable[..., fx.Node],
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    scale: Any,
    attn_mask: Any = None,
    is_causal: bool = False,
    **_: Any,
) -> fx.Node:
    """Scores are scaled, not queries: products read what linear layers give."""
    scores = call(torch.matmul, query, call("transpose", key, -2, -1))
    scores = call(torch.mul, scores, scale)
    if is_causal:
        ones = call("new_ones", query, (call("size", query, -2), call("size", key, -2)))
        attn_mask = call("bool", call("tril", ones))
    if attn_mask is not None:
        hidden = call("logical_not", attn_mask)
        scores = call("masked_fill", scores, hidden, torch.finfo(torch.float32).min)
    return call(torch.matmul, call(F.softmax, scores, dim=-1), value)


# The layers of one ``nn.LSTM`` or ``nn.GRU`` as modules of their own: each is decided by itself.


_KINDS = (nn.LSTM, nn.GRU)


def layers_of_recurrent(module: nn.Module) -> list[nn.Module]:
    """A module for each layer, in order, which share the weights; of what is none of these ``[]``.

    >>> [type(layer).__name__ for layer in layers_of_recurrent(nn.GRU(3, 4, num_layers=2))]
    ['GRU', 'GRU']
    """
    if type(module) not in _KINDS:
        return []
    whole: Any = module
    directions = 2 if whole.bidirectional else 1
    found: list[nn.Module] = []
    for number in range(whole.num_layers):
        read = (whole.proj_size or whole.hidden_size) * directions if number else whole.input_size
        more = {"proj_size": whole.proj_size} if isinstance(whole, nn.LSTM) else {}
        with torch.device("meta"):
            layer: Any = type(whole)(
                read,
                whole.hidden_size,
                bias=whole.bias,
                batch_first=whole.batch_first,
                bidirectional=whole.bidirectional,
                **more,
            )
        for name in dict(layer.named_parameters()):
            setattr(layer, name, getattr(whole, name.replace("_l0", f"_l{number}")))
        layer.flatten_parameters()
        found.append(layer.eval())
    return found


def can_separate_layers(node: fx.Node, *, lstm: bool) -> bool:
    """Whether what reads a call takes the parts of its result one by one, and its state is written out."""
    if node.kwargs or len(node.args) > 2 or (len(node.args) == 2 and _is_unknown(node.args[1])):
        return False
    parts = list(node.users)
    states = [user for part in parts for user in part.users if part.args[1:] == (1,)]
    return all(map(_is_part, parts)) and (not lstm or all(map(_is_part, states)))


def _is_unknown(state: Any) -> bool:
    """Neither a value of the graph nor a pair of these."""
    pair = state if isinstance(state, tuple | list) else (state,)
    return not all(isinstance(each, fx.Node) for each in pair)


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[1] in (0, 1)


def separate_recurrent_layers(captured: Captured, names: Sequence[str]) -> None:
    """Put the layers of the modules that nodes of these names call in their place.

    They are nodes that ``can_separate_layers``. The modules are called ``PATH_layer_0``, and so on.

    >>> from backquant.graph import capture
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.rnn = nn.LSTM(3, 4, num_layers=2)
    ...     def forward(self, x):
    ...         y, (h, _) = self.rnn(x)
    ...         return y, h
    >>> net, x = Net().eval(), torch.randn(5, 2, 3)
    >>> captured = capture(net)
    >>> separate_recurrent_layers(captured, ["rnn"])
    >>> all(map(torch.equal, captured.module(x), net(x)))
    True
    """
    module = captured.module
    nodes = {node.name: node for node in module.graph.nodes}
    for name in names:
        _take_apart(captured, nodes[name])
    module.graph.eliminate_dead_code()
    module.recompile()


def _take_apart(captured: Captured, node: fx.Node) -> None:
    module, graph = captured.module, captured.module.graph
    whole: Any = get_module(module, str(node.target))
    count = 2 if whole.bidirectional else 1
    scope = captured.scopes.get(node.name, Scope(str(node.target), type(whole)))
    value, states = node.args[0], []
    with graph.inserting_before(node):
        for number, layer in enumerate(layers_of_recurrent(whole)):
            path = f"{node.target}_layer_{number}"
            set_module(module, path, layer)
            rows = slice(number * count, (number + 1) * count)
            args = (value, *(_rows(graph, state, rows, whole) for state in node.args[1:]))
            called = graph.call_module(path, args)
            captured.scopes[called.name] = Scope(f"{scope.path}_layer_{number}", type(layer))
            value = _part(graph, called, 0)
            states.append(_part(graph, called, 1))
        results = (value, _joined(graph, states, whole))
    for part in list(node.users):
        _replace(graph, part, results[part.args[1]])  # type: ignore[index]
    graph.erase_node(node)
    captured.scopes.pop(node.name, None)


def _part(graph: fx.Graph, value: Any, index: Any) -> fx.Node:
    return graph.call_function(operator.getitem, (value, index))


def _rows(graph: fx.Graph, state: Any, rows: slice, whole: nn.Module) -> Any:
    """The state of one layer."""
    if not isinstance(whole, nn.LSTM):
        return _part(graph, state, rows)
    pair = state if isinstance(state, tuple | list) else [_part(graph, state, i) for i in (0, 1)]
    return tuple(_part(graph, each, rows) for each in pair)


def _joined(graph: fx.Graph, states: list[fx.Node], whole: nn.Module) -> Any:
    """The state of all layers: a value, of an LSTM two."""
    if not isinstance(whole, nn.LSTM):
        return graph.call_function(torch.cat, (states, 0))
    parts = ([_part(graph, state, index) for state in states] for index in (0, 1))
    return tuple(graph.call_function(torch.cat, (part, 0)) for part in parts)


def _replace(graph: fx.Graph, part: fx.Node, found: Any) -> None:
    if isinstance(found, tuple):  # a state of two values, read one by one
        for inner in list(part.users):
            _replace(graph, inner, found[inner.args[1]])  # type: ignore[index]
    else:
        part.replace_all_uses_with(found)
    graph.erase_node(part)


# Layers that read what is scaled sample by sample: ``layer(x / r) * r``.
#
# ``r`` is the largest value of a sample. In float that is what the layer gives. On integers ``x / r`` fills
# its range whatever the sample: one static range then holds a whisper as it holds a shout.
#
# Where the results of a layer are rounded, too, its channels can be divided by their largest values, which
# the same product takes back: each channel then has a range of its own.
#
# Where the channels of an input differ in size from sample to sample, too (the low and the high tones of a
# sound), they can be divided into parts: ``a(x1 / r1) * r1 + b(x2 / r2) * r2``, with half of the weights
# each.


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
