"""The layers of one ``nn.LSTM`` or ``nn.GRU`` as modules of their own: each is decided by itself."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from backquant.graph import Captured, Scope, get_module, set_module

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
