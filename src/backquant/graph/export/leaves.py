"""Which nodes of an exported graph are together one call of a module that stays one operator.

All nodes that one call of the module made are one group. It becomes a call of the module when it reads
one tensor besides the module's own (of a recurrent layer or cell: and its state), and one of its values is
read elsewhere (of a recurrent layer: items of its tuple); else its nodes stay what they are (an attention
layer is its projections and matrix products).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from backquant.graph.decompose import COMPOSED
from backquant.graph.export.recurrent_shapes import RECURRENT
from backquant.graph.export.scopes import Place, place_of
from backquant.graph.export.tidy import SCATTER
from backquant.graph.hooks import has_hooks
from backquant.graph.mutation import is_view
from backquant.graph.tracer import is_leaf


@dataclass(frozen=True)
class Leaf:
    """One call of a module: what it reads, the value it gives, and the nodes that are inside of it.

    ``items``: for nodes that are items of the module's result, the indices that lead to them. ``state``:
    what a recurrent layer or cell is given to begin with.
    """

    path: str
    module: nn.Module
    value: fx.Node
    result: fx.Node
    nodes: tuple[fx.Node, ...]
    items: Mapping[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    state: tuple[fx.Node, ...] = ()


def find_leaves(
    graph: fx.Graph,
    owned: Mapping[fx.Node, torch.Tensor],
    module_at: Callable[[Place, tuple[fx.Node, ...]], nn.Module | None],
) -> list[Leaf]:
    """The calls of leaf modules in ``graph``.

    Args:
        owned: the tensors of the model by the placeholder that stands for them.
        module_at: the module that made some nodes, if it is known or can be built.
    """
    groups: dict[Place, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            groups.setdefault(place_of(node), []).append(node)
    found = []
    for place, called in groups.items():
        nodes = _without_remade_views(called)
        module = module_at(place, tuple(nodes)) if place.path else None
        if module is not None:
            leaf = _leaf(place, module, nodes, owned)
            if leaf is not None:
                found.append(leaf)
    return found


def _without_remade_views(nodes: list[fx.Node]) -> list[fx.Node]:
    """``nodes`` without the views that making a program functional makes anew in front of the one call that
    reads the changed tensor, in the name of the module that the call belongs to."""
    *before, last = nodes
    if _is_own(last) and not any(map(_is_own, before)):
        return [last]
    return nodes


def _is_own(node: fx.Node) -> bool:
    """Whether it computes; not a view, nor what writes a changed view back."""
    return not is_view(node) and node.target not in SCATTER.values()


def _leaf(
    place: Place, module: nn.Module, nodes: list[fx.Node], owned: Mapping[fx.Node, torch.Tensor]
) -> Leaf | None:
    if isinstance(module, (*COMPOSED, torch.jit.ScriptModule)) or not is_leaf(module):
        return None
    if has_hooks(module):  # what they do is in the graph, among the module's own nodes
        return None
    if not _takes_one(type(module).forward):
        return None
    inside = set(nodes)
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    read = {
        value
        for node in nodes
        for value in node.all_input_nodes
        if value not in inside and not (value in owned and id(owned[value]) in own)
    }
    state = _state(module, nodes, read)
    tensors = [value for value in read if not _is_size(value) and value not in state]
    given = [node for node in nodes if any(user not in inside for user in node.users)]
    if len(tensors) != 1 or not _says_all(module, nodes):
        return None
    if isinstance(module, nn.RNNBase | nn.LSTMCell):
        leaf = Leaf(place.path, module, tensors[0], nodes[0], tuple(nodes), state=state)
        return _recurrent(leaf, given)
    if len(given) != 1:
        return None
    return Leaf(place.path, module, tensors[0], given[0], tuple(nodes), state=state)


def _state(module: nn.Module, nodes: list[fx.Node], read: set[fx.Node]) -> tuple[fx.Node, ...]:
    """The state that a recurrent layer or cell is given from elsewhere, and reads as nothing else."""
    if not isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return ()
    calls = [node for node in nodes if node.target in RECURRENT]
    if len(calls) != 1:
        return ()
    value, given = calls[0].args[:2]
    state = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if value in state or not all(one in read for one in state):
        return ()
    return state


def _recurrent(leaf: Leaf, given: list[fx.Node]) -> Leaf | None:
    """A recurrent layer whose items are read: output, hidden state, and of an LSTM the cell state; or an
    LSTM cell, whose items are its states."""
    sources = {node.args[0] for node in given if node.target is operator.getitem}
    if len(sources) != 1 or any(node.target is not operator.getitem for node in given):
        return None
    [source] = sources
    assert isinstance(source, fx.Node)
    is_lstm = isinstance(leaf.module, nn.LSTM)
    paths: list[tuple[int, ...]] = [(0,), (1, 0), (1, 1)] if is_lstm else [(0,), (1,)]
    items = {node: paths[int(node.args[1])] for node in given}  # type: ignore[arg-type]
    return replace(leaf, result=source, items=items)


def _is_size(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))


@lru_cache(maxsize=1024)
def _takes_one(forward: Callable[..., Any]) -> bool:
    """Whether a method needs one argument."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return sum(p.default is inspect.Parameter.empty for p in parameters) == 1


def _says_all(module: nn.Module, nodes: list[fx.Node]) -> bool:
    """Whether the module tells the call: a transposed convolution may be given its output size."""
    if not isinstance(module, nn.modules.conv._ConvTransposeNd):
        return True
    args: tuple[Any, ...] = nodes[-1].args
    padding = tuple(args[5]) if len(args) > 5 else (0,) * len(module.output_padding)
    return padding == tuple(module.output_padding)
