"""An aten graph in the spelling of backends' entries, node for node.

Unlike the lifting of ``backquant.graph.export`` this keeps every node and its name, so that what is
decided about a node holds for the node of that name in the aten graph.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from backquant.graph import Scope
from backquant.graph.export.scopes import place_of
from backquant.operators.aten import AtenSpeller
from backquant.operators.index import find


@dataclass(frozen=True)
class Respelled:
    """``module`` has the nodes of the aten graph by their names; ``weights`` the name of the node that
    holds the weight of a called module, by the name of the call."""

    module: fx.GraphModule
    scopes: dict[str, Scope] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)


def respelled(module: fx.GraphModule) -> Respelled:
    """A copy of ``module`` with modules, functions and methods for its overloads.

    The copy shares the tensors; ``module`` stays as it is.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> found = respelled(torch.export.export(model, (torch.zeros(1, 2),)).module())
    >>> [(node.name, node.target) for node in found.module.graph.nodes if node.op == "call_module"]
    [('linear', '_module_linear'), ('relu', '_module_relu')]
    >>> found.weights
    {'linear': '_0_weight'}
    """
    return _Writer(module).run()


class _Writer:
    """Writes the copy node by node."""

    def __init__(self, source: fx.GraphModule) -> None:
        self._source = source
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._speller = AtenSpeller()
        self._values: dict[str, Any] = {}
        self._scopes: dict[str, Scope] = {}
        self._weights: dict[str, str] = {}
        calls = (node for node in source.graph.nodes if node.op == "call_function")
        self._operators = Counter(place_of(node).call for node in calls)

    def run(self) -> Respelled:
        """Make the copy."""
        for node in self._source.graph.nodes:
            if node.op == "call_module" and not node.users:
                continue  # checks of the arguments
            self._made[node] = self._write(node)
            self._scopes[self._made[node].name] = _scope(node)
        for made in reversed(list(self._graph.nodes)):
            if made.op == "get_attr" and not made.users:
                self._graph.erase_node(made)
            elif made.op in ("get_attr", "call_module") and made.target not in self._values:
                self._values[made.target] = attrgetter(made.target)(self._source)
        copied = fx.GraphModule(self._values, self._graph)
        return Respelled(copied, self._scopes, self._weights)

    def _write(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function" or not _computes_floats(node):
            return self._graph.node_copy(node, self._made.__getitem__)
        module = self._module(node)
        if module is not None:
            path = f"_module_{node.name}"
            self._values[path] = module
            value = self._made[_input(node)]
            made = self._graph.create_node("call_module", path, (value,), {}, node.name)
        else:
            call = self._speller.call(node.target, node.args, node.kwargs)
            if call is None:
                return self._graph.node_copy(node, self._made.__getitem__)
            args, kwargs = fx.node.map_arg(
                (tuple(call.args), dict(call.kwargs)), self._made.__getitem__
            )
            made = self._graph.create_node(call.kind, call.target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        return made

    def _module(self, node: fx.Node) -> nn.Module | None:
        """The module that ``node`` is the only operator of, if it is one of PyTorch's."""
        place = place_of(node)
        if not place.cls.startswith("torch.nn.modules.") or self._operators[place.call] != 1:
            return None
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._known)
        module = self._speller.module(node.target, args, kwargs)
        if module is None or type(module) is not _scope(node).module_type:
            return None
        weight = _weight(node)
        if weight is not None:
            self._weights[node.name] = weight.name
        return module.eval()

    def _known(self, node: fx.Node) -> Any:
        return attrgetter(str(node.target))(self._source) if node.op == "get_attr" else node


def _input(node: fx.Node) -> fx.Node:
    """What a module is called with; the weight of ``aten.embedding`` comes before it."""
    value = node.args[1 if _is_lookup(node) else 0]
    assert isinstance(value, fx.Node)
    return value


def _weight(node: fx.Node) -> fx.Node | None:
    known = find(node.target)
    if known is None or not known.is_weighted:
        return None
    index = known.aten_weight_index
    index = known.weight_index if index is None else index
    value = node.args[index] if index is not None and index < len(node.args) else None
    return value if isinstance(value, fx.Node) else None


def _is_lookup(node: fx.Node) -> bool:
    """Whether its other argument than the weight is indices, which only select."""
    known = find(node.target)
    return known is not None and known.family == "embedding"


def _computes_floats(node: fx.Node) -> bool:
    """Whether floats are computed from floats: no mask, no index."""
    values = [node.meta.get("val")]
    if not _is_lookup(node):
        values += [source.meta.get("val") for source in node.all_input_nodes]
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and all(tensor.is_floating_point() for tensor in tensors)


def _scope(node: fx.Node) -> Scope:
    place = place_of(node)
    owner, _, name = place.cls.rpartition(".")
    found = getattr(sys.modules.get(owner), name, None) if owner else None
    return Scope(place.path, found if place.path and isinstance(found, type) else None)
