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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from backquant.graph.decompose import COMPOSED
from backquant.graph.edit import NamePool
from backquant.graph.export.opaque import RECURRENT, TENSOR, OpaqueCall, opaque_operator
from backquant.graph.export.signature import Signature, free_axes
from backquant.graph.export.tidy import SCATTER, Place, place_of
from backquant.graph.hooks import has_hooks
from backquant.graph.in_place import is_view
from backquant.graph.objects import field_index
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


@dataclass
class Lifted:
    """The new graph, with the scope of each node by name, and the axes of its tensor whose size is free.
    Buffers were added to the root."""

    graph: fx.Graph
    scopes: dict[str, Scope] = field(default_factory=dict)
    free: dict[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lifting:
    """What is known before: the exported graph, whose tensors are whose, and what its parts are.

    ``owned``: path and tensor of parameters, buffers and constants, by placeholder; a path is ``""``
    for a tensor that the model has no name for. ``leaves``: calls of modules; ``opaque``: calls by key.
    """

    graph: fx.Graph
    root: nn.Module
    owned: Mapping[fx.Node, tuple[str, torch.Tensor]]
    signature: Signature
    speller: Speller
    leaves: tuple[Leaf, ...] = ()
    opaque: Mapping[str, OpaqueCall] = field(default_factory=dict)

    def run(self) -> Lifted:
        """Make the new graph."""
        return _Writer(self).run()


class _Writer:
    """Writes the new graph node by node."""

    def __init__(self, source: Lifting) -> None:
        self._source = source
        self._root = source.root
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self._scopes: dict[str, Scope] = {}
        self._types = {path: type(m) for path, m in source.root.named_modules()}
        self._names = NamePool(source.root)
        self._constants = Constants({node: t for node, (_, t) in source.owned.items()})
        self._inside = {node: leaf for leaf in source.leaves for node in leaf.nodes}
        self._items: dict[fx.Node, list[Any]] = {}

    def run(self) -> Lifted:
        inputs = [
            node
            for node in self._source.graph.nodes
            if node.op == "placeholder" and node not in self._source.owned
        ]
        self._made.update(self._source.signature.write(self._graph, inputs))
        for node in self._source.graph.nodes:
            if node.op == "call_function":
                self._write(node)
            elif node.op == "output":
                self._write_output(node)
        self._drop_unused()
        pairs = ((made, free_axes(node)) for node, made in self._made.items())
        free = {made.name: axes for made, axes in pairs if axes and isinstance(made, fx.Node)}
        return Lifted(self._graph, self._scopes, free)

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
        path = self._source.owned[node][0] if node in self._source.owned else ""
        if not path:
            path = self._names.take("constant_")
            # register_buffer would run the hook that PyTorch 2.12 leaves behind when an export failed
            self._root._buffers[path] = value.detach() if not is_mapped(value) else value
        return self._note(self._graph.get_attr(path), node)

    def _arguments(self, values: Any) -> Any:
        return fx.node.map_arg(values, self._value)

    def _note(self, made: fx.Node, node: fx.Node) -> fx.Node:
        path = place_of(node).path
        kind = self._types.get(path) if path else None
        self._scopes[made.name] = Scope(path if kind is not None else "", kind)
        return made

    # -- nodes ---------------------------------------------------------------------------------------

    def _write(self, node: fx.Node) -> None:
        leaf = self._inside.get(node)
        if leaf is not None and not self._is_folded(leaf):
            if node is leaf.result:
                self._call_leaf(leaf)
            elif node in leaf.items:
                self._made[node] = self._item(self._made[leaf.result], leaf.items[node], node)
        elif node.target is opaque_operator():
            self._call_opaque(node)
        elif node.target is operator.getitem and node.args[0] in self._items:
            self._made[node] = self._items[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.target is torch.ops.aten.sym_size.int and not self._is_constant(node.args[0]):
            self._made[node] = self._call(Call("call_method", "size", node.args), node)
        elif self._constants.compute(node) is None:
            self._call_operator(node)

    def _is_constant(self, value: Any) -> bool:
        return value in self._constants

    def _is_folded(self, leaf: Leaf) -> bool:
        """Whether a module reads a constant: its operators are computed ahead; tables are looked up."""
        is_table = isinstance(
            leaf.module, (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase)
        )
        return not is_table and self._is_constant(leaf.value)

    def _call_leaf(self, leaf: Leaf) -> None:
        state = tuple(self._value(value) for value in leaf.state)
        pair = isinstance(leaf.module, nn.LSTM | nn.LSTMCell)
        given = ((state,) if pair else state) if state else ()
        made = self._graph.call_module(leaf.path, (self._value(leaf.value), *given))
        self._scopes[made.name] = Scope(leaf.path, type(leaf.module))
        self._made[leaf.result] = made

    def _item(self, value: fx.Node, path: tuple[int, ...], node: fx.Node) -> fx.Node:
        for index in path:
            value = self._graph.call_function(operator.getitem, (value, index))
            self._scopes[value.name] = self._outside(node)
        return value

    def _call_operator(self, node: fx.Node) -> None:
        call = None
        if _is_float(node, self._source.speller):
            call = self._source.speller.call(node.target, node.args, node.kwargs)
        if call is None:
            call = Call("call_function", node.target, node.args, node.kwargs)
        self._made[node] = self._call(call, node)

    def _call(self, call: Call, node: fx.Node) -> fx.Node:
        args, kwargs = self._arguments((tuple(call.args), dict(call.kwargs)))
        return self._note(self._graph.create_node(call.kind, call.target, args, kwargs), node)

    def _call_opaque(self, node: fx.Node) -> None:
        key, given = node.args
        call = self._source.opaque[str(key)]
        tensors = iter([self._value(value) for value in given])  # type: ignore[union-attr, arg-type]
        leaves = [next(tensors) if leaf is TENSOR else leaf for leaf in call.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        made = self._graph.call_module(call.path, tuple(args), dict(kwargs))
        self._scopes[made.name] = Scope(call.path, self._types.get(call.path))
        self._items[node] = self._parts(made, call, node)

    def _parts(self, made: fx.Node, call: OpaqueCall, node: fx.Node) -> list[Any]:
        """The tensors of what an opaque module returns, in the order of the flat outputs."""
        tree = pytree.tree_unflatten(list(call.out_leaves), call.out_spec)
        found = []
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, torch.Tensor):
                found.append(self._part(made, tree, path, node))
        return found

    def _part(self, value: fx.Node, tree: Any, path: tuple[Any, ...], node: fx.Node) -> fx.Node:
        for key in path:
            index = field_index(tree, getattr(key, "name", None))
            tree = key.get(tree)
            if index is not None:
                value = self._graph.call_function(operator.getitem, (value, index))
            elif isinstance(key, pytree.GetAttrKey):
                value = self._graph.call_function(getattr, (value, key.name))
            else:
                index = key.idx if isinstance(key, pytree.SequenceKey) else key.key
                value = self._graph.call_function(operator.getitem, (value, index))
            self._scopes[value.name] = self._outside(node)
        return value

    def _outside(self, node: fx.Node) -> Scope:
        """The scope of the module that calls the one that ``node`` is in."""
        path = place_of(node).path.rpartition(".")[0]
        return Scope(path, self._types.get(path) if path else None)

    def _write_output(self, node: fx.Node) -> None:
        flat = [
            self._value(value) if isinstance(value, fx.Node) else value
            for value in node.args[0]  # type: ignore[union-attr]
        ]
        self._graph.output(self._source.signature.interface.output.nested(flat))

    def _drop_unused(self) -> None:
        for made in reversed(list(self._graph.nodes)):
            if made.op in ("get_attr", "call_function", "call_method") and not made.users:
                self._graph.erase_node(made)
                self._scopes.pop(made.name, None)


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
        if not self._may(node):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        try:
            with torch.no_grad():
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        except RuntimeError:
            if any(map(is_mapped, self._of(node))):
                return None  # a run of the graph fails as well, and is told in our words
            raise
        if isinstance(value, torch.Tensor) and value.numel() > _LARGE:
            read = sum(map(self._size, self._read(node)))
            if value.numel() > 2 * read:
                return None
        self._values[node] = value
        return value

    def _may(self, node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload) and node.op != "call_function":
            return False
        if isinstance(node.target, OpOverload) and _is_random(node.target):
            return False
        return all(source in self._values for source in self._read(node))

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values ``node`` depends on."""
        is_new = node.target in _NEW and _like(node.args[0]) is not None
        return [n for n in node.all_input_nodes if not (is_new and n is node.args[0])]

    def _value(self, node: fx.Node) -> Any:
        return self._values[node] if node in self._values else _like(node)

    def _of(self, node: fx.Node) -> list[Any]:
        return [self._values.get(source) for source in node.all_input_nodes]

    def _size(self, node: fx.Node) -> int:
        value = self._values[node]
        return value.numel() if isinstance(value, torch.Tensor) else 0


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


def _is_random(overload: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags or overload.namespace != "aten"


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
