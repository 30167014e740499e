"""An exported graph in the spelling of a symbolic trace.

1. The nodes of one call of a leaf module become ``call_module`` at the module's own path.
2. Any other operator becomes the function or method that entries of backends name, if its tensors are
   floats; what has no such spelling, and what computes masks and indices, stays an ``aten`` call.
3. Weights that are passed to functions are read with ``get_attr`` at their own path. Values that depend
   on no input are computed now and become buffers.
4. Sizes are read with ``size``; the arithmetic on them stays.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from backquant.graph.decompose import COMPOSED
from backquant.graph.edit import NamePool
from backquant.graph.export.opaque import RECURRENT, TENSOR, OpaqueCall, opaque_operator
from backquant.graph.export.signature import Signature, free_axes, read_path
from backquant.graph.export.tidy import SCATTER, Place, place_of
from backquant.graph.hooks import has_hooks
from backquant.graph.in_place import is_view
from backquant.graph.provenance import Scope
from backquant.graph.tracer import is_leaf

# Which nodes of an exported graph are together one call of a module that stays one operator.
#
# All nodes that one call of the module made are one group. It becomes a call of the module when it reads
# one tensor besides the module's own (of a recurrent layer or cell: and its state), and one of its values is
# read elsewhere (of a recurrent layer: items of its tuple); else its nodes stay what they are (an attention
# layer is its projections and matrix products).


@dataclass(frozen=True)
class Leaf:
    """One call of a module: what it reads, the value it gives, and the nodes that are inside of it.

    ``items``: for nodes that are items of the module's result, the keys that lead to them. ``state``:
    what a recurrent layer or cell is given to begin with.
    """

    path: str
    module: nn.Module
    value: fx.Node
    result: fx.Node
    nodes: tuple[fx.Node, ...]
    items: Mapping[fx.Node, tuple[Any, ...]] = field(default_factory=dict)
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
    paths = [(0,), (1, 0), (1, 1)] if is_lstm else [(0,), (1,)]
    keys: list[Any] = [tuple(map(pytree.SequenceKey, path)) for path in paths]
    numbers: dict[fx.Node, Any] = {node: node.args[1] for node in given}
    items = {node: keys[number] for node, number in numbers.items()}
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


class Lifting:
    """Writes the new graph, by ``run()``, which adds buffers to ``root``.

    Args:
        graph: the exported graph.
        root: the modules that the new one calls.
        owned: path and tensor of parameters, buffers and constants, by placeholder; a path is ``""`` for a
            tensor that the model has no name for.
        leaves: calls of modules.
        opaque: calls by key.

    ``scopes`` is then the scope of each node, by name; ``free`` the axes of its tensor whose size is free.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        owned: Mapping[fx.Node, tuple[str, torch.Tensor]],
        signature: Signature,
        speller: Speller,
        leaves: Sequence[Leaf] = (),
        opaque: Mapping[str, OpaqueCall] = MappingProxyType({}),
    ) -> None:
        self._source, self._root, self._owned = graph, root, owned
        self._signature, self._speller, self._opaque = signature, speller, opaque
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self.scopes: dict[str, Scope] = {}
        self.free: dict[str, frozenset[int]] = {}
        self._types = {path: type(m) for path, m in root.named_modules()}
        self._names = NamePool(root)
        self._constants = Constants({node: t for node, (_, t) in owned.items()})
        self._inside = {node: leaf for leaf in leaves for node in leaf.nodes}
        self._items: dict[fx.Node, list[Any]] = {}

    def run(self) -> fx.Graph:
        places = self._source.find_nodes(op="placeholder")
        inputs = [node for node in places if node not in self._owned]
        self._made.update(self._signature.write(self._graph, inputs))
        for node in self._source.nodes:
            if node.op == "call_function":
                self._write(node)
        returned: Any = fx.node.map_arg(self._source.output_node().args[0], self._value)
        self._graph.output(self._signature.interface.output.nested(list(returned)))
        for made in reversed(list(self._graph.nodes)):
            if made.op in ("get_attr", "call_function", "call_method") and not made.users:
                self._graph.erase_node(made)
                self.scopes.pop(made.name, None)
        pairs = ((made, free_axes(node)) for node, made in self._made.items())
        self.free |= {made.name: x for made, x in pairs if x and isinstance(made, fx.Node)}
        return self._graph

    # -- values --------------------------------------------------------------------------------------

    def _value(self, node: fx.Node) -> Any:
        """What stands for a node of the exported graph; constants are read where they are used first."""
        if node not in self._made:
            self._made[node] = self._read(node)
        return self._made[node]

    def _read(self, node: fx.Node) -> Any:
        value = self._constants[node]
        if not isinstance(value, torch.Tensor):
            return value
        path = self._owned[node][0] if node in self._owned else ""
        if not path:
            path = self._names.take("constant_")
            # register_buffer would run the hook that PyTorch 2.12 leaves behind when an export failed
            self._root._buffers[path] = value.detach() if not is_mapped(value) else value
        return self._noted(self._graph.get_attr(path), place_of(node).path)

    def _noted(self, made: fx.Node, path: str) -> fx.Node:
        """``made`` in the scope of the module at ``path``."""
        kind = self._types.get(path) if path else None
        self.scopes[made.name] = Scope(path if kind is not None else "", kind)
        return made

    def _parts_of(
        self, made: fx.Node, path: Sequence[Any], node: fx.Node, tree: Any = None
    ) -> fx.Node:
        """What stands at ``path`` in the result of a module, in the scope of what calls that."""
        around = place_of(node).path.rpartition(".")[0]
        for part in read_path(self._graph, made, path, tree):
            made = self._noted(part, around)
        return made

    # -- nodes ---------------------------------------------------------------------------------------

    def _write(self, node: fx.Node) -> None:
        leaf = self._inside.get(node)
        if leaf is not None and not self._is_folded(leaf):
            if node is leaf.result:
                self._call_leaf(leaf)
            elif node in leaf.items:
                self._made[node] = self._parts_of(self._made[leaf.result], leaf.items[node], node)
        elif node.target is opaque_operator():
            self._call_opaque(node)
        elif node.target is operator.getitem and node.args[0] in self._items:
            self._made[node] = self._items[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.target is torch.ops.aten.sym_size.int and node.args[0] not in self._constants:
            self._made[node] = self._call(Call("call_method", "size", node.args), node)
        elif self._constants.compute(node) is None:
            call = None
            if _is_float(node, self._speller):
                call = self._speller.call(node.target, node.args, node.kwargs)
            call = call or Call("call_function", node.target, node.args, node.kwargs)
            self._made[node] = self._call(call, node)

    def _is_folded(self, leaf: Leaf) -> bool:
        """Whether a module reads a constant: its operators are computed ahead; tables are looked up."""
        tables = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase)
        return leaf.value in self._constants and not isinstance(leaf.module, tables)

    def _call_leaf(self, leaf: Leaf) -> None:
        state = tuple(self._value(value) for value in leaf.state)
        pair = isinstance(leaf.module, nn.LSTM | nn.LSTMCell)
        given = ((state,) if pair else state) if state else ()
        made = self._graph.call_module(leaf.path, (self._value(leaf.value), *given))
        self.scopes[made.name] = Scope(leaf.path, type(leaf.module))
        self._made[leaf.result] = made

    def _call(self, call: Call, node: fx.Node) -> fx.Node:
        args, kwargs = fx.node.map_arg((tuple(call.args), dict(call.kwargs)), self._value)
        made = self._graph.create_node(call.kind, call.target, args, kwargs)
        return self._noted(made, place_of(node).path)

    def _call_opaque(self, node: fx.Node) -> None:
        arguments: Any = node.args
        call = self._opaque[arguments[0]]
        tensors = iter([self._value(value) for value in arguments[1]])
        leaves = [next(tensors) if leaf is TENSOR else leaf for leaf in call.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        made = self._graph.call_module(call.path, tuple(args), dict(kwargs))
        self.scopes[made.name] = Scope(call.path, self._types.get(call.path))
        tree = pytree.tree_unflatten(list(call.out_leaves), call.out_spec)
        self._items[node] = [  # its tensors, in the order of the flat outputs
            self._parts_of(made, path, node, tree)
            for path, leaf in pytree.tree_flatten_with_path(tree)[0]
            if isinstance(leaf, torch.Tensor)
        ]


def _is_float(node: fx.Node, speller: Speller) -> bool:
    """Whether a node computes floats, or truths and positions, from floats: no mask, no index."""
    read = [source.meta.get("val") for source in _read_as_values(node, speller)]
    values = read if speller.gives_truths(node.target) else [node.meta.get("val"), *read]
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and all(tensor.is_floating_point() for tensor in tensors)


def _read_as_values(node: fx.Node, speller: Speller) -> list[fx.Node]:
    """The arguments whose values are computed with; the indices of an embedding only select."""
    if node.target is torch.ops.aten.embedding.default:
        return node.all_input_nodes[:1]
    places = [node.args[i] for i in speller.places(node.target) if i < len(node.args)]
    return [source for source in node.all_input_nodes if source not in places]


# Values of an exported graph that depend on no input, computed once.
_LARGE = 1 << 22  # elements
_aten = torch.ops.aten

#: Operators that read only dtype and device of their first argument.
_NEW = frozenset({_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default})


class Constants:
    """The values of nodes that depend on no input; none that is random, or large and made of little.

    ``x.new_zeros(3, 4)`` depends on no value of ``x``: what is written into it (masks of windows) is known.

    >>> graph = fx.Graph()
    >>> w = graph.placeholder("w")
    >>> known = Constants({w: torch.ones(2)})
    >>> twice = graph.call_function(torch.ops.aten.mul.Tensor, (w, 2))
    >>> known.compute(twice)
    tensor([2., 2.])
    """

    def __init__(self, tensors: dict[fx.Node, torch.Tensor]) -> None:
        self._values: dict[fx.Node, Any] = dict(tensors)

    def __contains__(self, node: object) -> bool:
        return node in self._values

    def __getitem__(self, node: fx.Node) -> Any:
        return self._values[node]

    def compute(self, node: fx.Node) -> Any:
        """The value of ``node`` (noted for those who read it), or ``None`` if it is no constant."""
        read = self._read(node)
        if not all(source in self._values for source in read) or _is_random(node.target):
            return None
        values, call = self._values, cast(Callable[..., Any], node.target)
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: values[n] if n in values else _like(n)
        )
        try:
            with torch.no_grad():
                value = call(*args, **kwargs)
        except RuntimeError:
            if any(is_mapped(values.get(source)) for source in node.all_input_nodes):
                return None  # a run of the graph fails as well, and is told in our words
            raise
        if isinstance(value, torch.Tensor) and value.numel() > _LARGE:
            sources = [values[n] for n in read if isinstance(values[n], torch.Tensor)]
            if value.numel() > 2 * sum(source.numel() for source in sources):
                return None
        values[node] = value
        return value

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values ``node`` depends on."""
        is_new = node.target in _NEW and _like(node.args[0]) is not None
        return [n for n in node.all_input_nodes if not (is_new and n is node.args[0])]


def is_mapped(value: Any) -> bool:
    """Whether ``value`` is of a function that ``torch.vmap`` maps, which nothing outside of it can read.

    >>> is_mapped(torch.zeros(1))
    False
    """
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_batchedtensor(value)


def _like(node: object) -> torch.Tensor | None:
    """A tensor without elements, of the dtype and on the device of a node's value."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return torch.empty(0, dtype=value.dtype, device=value.device)


def _is_random(target: object) -> bool:
    is_own = isinstance(target, OpOverload) and target.namespace != "aten"
    return is_own or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


# What the lifting of an exported graph has to be told about operators, as an interface.
#
# ``graph`` stands below ``operators``: the table comes in as an argument.
@dataclass(frozen=True)
class Call:
    """A call as symbolic tracing would have recorded it."""

    kind: Literal["call_function", "call_method"]
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Speller(Protocol):
    """Knows the spellings of operators."""

    def composed(self, node: fx.Node) -> fx.Node | None:
        """One call for the several that an operator was decomposed to, if they end in ``node``.

        It is inserted before ``node`` and has its meta data; ``None`` where nothing was decomposed.
        """

    def call(self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """The spelling that entries of backends use; ``None`` for an operator without one."""

    def places(self, overload: Any) -> tuple[int, ...]:
        """The arguments that are places in another one, by position."""

    def gives_truths(self, overload: Any) -> bool:
        """Whether the result are truths or positions of the values that are read."""

    def module(
        self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> nn.Module | None:
        """A module that does what a call does to its input; ``args`` hold tensors for its weights."""
