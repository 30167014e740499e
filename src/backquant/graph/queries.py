"""Read-only questions about a graph, answered from indexes that are built once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.graph.by_mode import ModeValue
from backquant.graph.edit import get_module
from backquant.graph.folding import is_random
from backquant.graph.tracer import is_leaf

#: Kinds of nodes that compute something.
CALLS = ("call_module", "call_function", "call_method")


@dataclass(frozen=True)
class OperatorKey:
    """What a node calls: a module's class, a function, or a method's name. Hashable."""

    kind: Literal["module", "function", "method"]
    op: Any


class NodeInfo(NamedTuple):
    """What a node calls, and how: PyTorch's key for tables of nodes.

    >>> NodeInfo("call_function", torch.relu) in {NodeInfo("call_function", torch.relu): "float"}
    True
    """

    op: str
    target: fx.node.Target


def operator_key(node: fx.Node, modules: dict[str, nn.Module]) -> OperatorKey | None:
    """The operator that a node calls; ``None`` for inputs, attributes and the output.

    The class of a parametrized module is the one it had before ``torch.nn.utils.parametrize``.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    >>> relu = next(node for node in gm.graph.nodes if node.op == "call_module")
    >>> operator_key(relu, dict(gm.named_modules())).op.__name__
    'ReLU'
    """
    if node.op == "call_module":
        return OperatorKey("module", type_before_parametrizations(modules[str(node.target)]))
    if node.op == "call_function":
        return OperatorKey("function", node.target)
    if node.op == "call_method":
        return OperatorKey("method", node.target)
    return None


def node_arguments(node: fx.Node) -> Iterator[Any]:
    """Positional, then keyword arguments, as they stand (nested lists are not opened).

    >>> gm = fx.symbolic_trace(lambda x: torch.add(x, 1, alpha=2))
    >>> [str(a) for n in gm.graph.nodes if n.name == "add" for a in node_arguments(n)]
    ['x', '1', '2']
    """
    yield from node.args
    yield from node.kwargs.values()


# Methods of tensors that give sizes.
_OF_SIZES = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size"})


class GraphIndex:
    """Indexes of one graph as it stands: build a new one after an edit.

    >>> gm = fx.symbolic_trace(lambda x: x + x.size(0))
    >>> index = GraphIndex(gm)
    >>> [index.has_no_tensors(index.nodes[name]) for name in ("x", "size", "add")]
    [False, True, False]
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.modules: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
        self.nodes: dict[str, fx.Node] = {}
        self.position: dict[fx.Node, int] = {}
        self.callers: dict[str, list[fx.Node]] = {}
        self.readers: dict[str, list[fx.Node]] = {}
        self._keys: dict[fx.Node, OperatorKey | None] = {}
        self._no_tensors: dict[fx.Node, bool] = {}
        for position, node in enumerate(module.graph.nodes):
            self.nodes[node.name] = node
            self.position[node] = position
            self._no_tensors[node] = self._find_no_tensors(node)
            if node.op == "call_module":
                self.callers.setdefault(str(node.target), []).append(node)
            elif node.op == "get_attr":
                self.readers.setdefault(str(node.target), []).append(node)

    def module_of(self, node: fx.Node) -> nn.Module | None:
        """The module that a ``call_module`` node calls; ``None`` for other nodes."""
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def key(self, node: fx.Node) -> OperatorKey | None:
        """``operator_key`` of a node of this graph."""
        if node not in self._keys:
            self._keys[node] = operator_key(node, self.modules)
        return self._keys[node]

    def calls(self) -> list[fx.Node]:
        """The nodes that compute something, in graph order."""
        return [node for node in self.nodes.values() if node.op in CALLS]

    def is_observer(self, node: fx.Node) -> bool:
        """Whether a node calls an observer or fake-quantizer."""
        return callable(getattr(self.module_of(node), "calculate_qparams", None))

    def is_opaque(self, node: fx.Node) -> bool:
        """Whether a node calls a module that was left untraced and is not an operator of ``torch.nn``."""
        module = self.module_of(node)
        return module is not None and not is_leaf(module)

    def gives_tuple(self, node: fx.Node) -> bool:
        """Whether a node gives several tensors: a recurrent layer, a cell, attention; a part of an LSTM's.

        >>> gm = fx.symbolic_trace(nn.Sequential(nn.LSTM(2, 2)))
        >>> lstm = next(node for node in gm.graph.nodes if node.op == "call_module")
        >>> state = gm.graph.call_function(operator.getitem, (lstm, 1))
        >>> hidden = gm.graph.call_function(operator.getitem, (state, 0))
        >>> index = GraphIndex(gm)
        >>> [index.gives_tuple(node) for node in (lstm, state, hidden)]
        [True, True, False]
        """
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return bool(node.args[1] == 1) and isinstance(self.module_of(node.args[0]), nn.LSTM)
        return isinstance(self.module_of(node), (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention))

    def is_part_of_tuple(self, node: fx.Node) -> bool:
        """Whether a node only picks an item of the tuple that a recurrent layer or cell returns.

        >>> gm = fx.symbolic_trace(nn.Sequential(nn.LSTM(2, 2)))
        >>> lstm = next(node for node in gm.graph.nodes if node.op == "call_module")
        >>> item = gm.graph.call_function(operator.getitem, (lstm, 0))
        >>> step = gm.graph.call_function(operator.getitem, (item, -1))
        >>> index = GraphIndex(gm)
        >>> index.is_part_of_tuple(item), index.is_part_of_tuple(step)
        (True, False)
        """
        path: list[Any] = []
        source: Any = node
        while isinstance(source, fx.Node) and source.target is operator.getitem:
            path.append(source.args[1])
            source = source.args[0]
        module = self.module_of(source) if path and isinstance(source, fx.Node) else None
        if isinstance(module, nn.LSTM):  # output, (hidden, cell)
            return path in ([0], [1], [0, 1], [1, 1])
        return isinstance(module, (nn.RNNBase, nn.LSTMCell)) and path in ([0], [1])

    def has_no_tensors(self, value: Any) -> bool:
        """Whether a value is certainly computed from no tensor: sizes, ranks, constants.

        The rules are PyTorch's (``all_node_args_have_no_tensors``), for equal decisions: not
        exact, ``False`` in doubt. What is no node has none. Where PyTorch's observe numbers, and fail
        (``x.shape[-1] ** -0.5``), these see Python's arithmetic; random numbers are no constants
        (``torch.randn(x.size(0), 2)``), and what exported graphs fill with floats (``aten.zeros``) is a
        tensor.
        """
        return self._no_tensors[value] if isinstance(value, fx.Node) else True

    def _find_no_tensors(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            if isinstance(self.module_of(node), ModeValue):
                return True
            return self.is_observer(node) and self.has_no_tensors(node.args[0])
        if node.op in ("placeholder", "get_attr"):
            return False
        if node.op == "call_function" and node.target is operator.getitem:
            return self.has_no_tensors(node.args[0])
        if node.target is getattr and node.args[1] in ("ndim", "shape"):
            return True
        if node.op == "call_method" and node.target in _OF_SIZES:
            return True
        if isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _NUMBERS:
            return True
        if _is_of_python(node.target) and node.all_input_nodes:
            return all(map(self.has_no_tensors, node.all_input_nodes))
        if is_random(getattr(node.target, "__name__", "")) or _fills_with_floats(node):
            return False
        return bool(node.args) and not any(map(self._may_hold_tensor, node.args))

    def _may_hold_tensor(self, argument: Any) -> bool:
        if isinstance(argument, list):
            return any(not self.has_no_tensors(item) for item in argument)
        if isinstance(argument, fx.Node):
            return not self.has_no_tensors(argument)
        return not isinstance(argument, int)


#: Operators of exported graphs that give a number, by name: of a tensor's shape, or its one value.
_NUMBERS = frozenset(
    {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "_local_scalar_dense", "item"}
)
_FILLED = frozenset({"zeros", "ones", "full"})


def _is_of_python(target: fx.node.Target) -> bool:
    """Whether a target is a function of Python's numbers, or of ``torch`` for symbols of numbers."""
    module = getattr(target, "__module__", "")
    return module in _PYTHON or (
        module == "torch" and getattr(target, "__name__", "").startswith("sym_")
    )


def _fills_with_floats(node: fx.Node) -> bool:
    """Whether a node of an exported graph makes a tensor of floats of one number."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._opname not in _FILLED:
        return False
    dtype = node.kwargs.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype.is_floating_point
    return target._opname != "full" or isinstance(node.args[1], float)


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """The nodes of an argument, in order, with repetitions; in lists and tuples of any depth.

    >>> x = fx.Graph().placeholder("x")
    >>> list(nodes_in([x, (1, x)]))
    [x, x]
    """
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_in(item)


_PYTHON = ("_operator", "math", "builtins")


#: Arguments that are no float tensors, from which position to which, by method, as PyTorch lists them.
_KNOWN_ARGUMENTS: dict[str, dict[Any, slice]] = {
    "masked_fill": {torch.bool: slice(1, 2), float: slice(2, 3)},
    **{name: {int: slice(1, 2)} for name in ("size", "unsqueeze", "unsqueeze_")},
    **{n: {int: slice(1, None)} for n in ("permute", "repeat", "reshape", "transpose", "view")},
}


def known_types(
    graph: fx.Graph, passes_value_through: Callable[[fx.Node], bool]
) -> dict[fx.Node, Any]:
    """Nodes whose value is known not to be a float tensor, from how methods use it.

    For ``x.masked_fill(mask, v)`` the mask is boolean; arguments of ``view`` after the first are
    integers. The type passes on to the first argument of nodes for which
    ``passes_value_through(node)`` holds (those that share qparams between input and output), and from
    stored tensors of integers on to what such nodes make of them.

    Returns ``bool`` tensors as ``torch.bool``, numbers as ``int`` or ``float``.

    >>> gm = fx.symbolic_trace(lambda x, mask: x.masked_fill(mask, 0.0))
    >>> {node.name: t for node, t in known_types(gm.graph, lambda node: False).items()}
    {'mask': torch.bool}
    """
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op != "call_method":
            continue
        for known, places in _KNOWN_ARGUMENTS.get(str(node.target), {}).items():
            for argument in node.args[places]:
                for item in argument if isinstance(argument, (tuple, list)) else (argument,):
                    _note_type(item, known, found, passes_value_through)
    _note_constants(graph, found, passes_value_through)
    return found


def _note_constants(
    graph: fx.Graph, found: dict[fx.Node, Any], passes_value_through: Callable[[fx.Node], bool]
) -> None:
    """Stored tensors of integers (positions, indices), and what only moves their values."""
    owner = graph.owning_module
    for node in graph.nodes:
        if node.op == "get_attr" and owner is not None:
            value = attrgetter(str(node.target))(owner)
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                found.setdefault(node, torch.bool if value.dtype == torch.bool else int)
        elif node.args and isinstance(node.args[0], fx.Node) and passes_value_through(node):
            known = found.get(node.args[0])
            if known is not None and node.args[0].op != "placeholder":
                found.setdefault(node, known)


def _note_type(
    value: Any,
    known: Any,
    found: dict[fx.Node, Any],
    passes_value_through: Callable[[fx.Node], bool],
) -> None:
    while isinstance(value, fx.Node) and value not in found:
        found[value] = known
        if not (passes_value_through(value) and value.args):
            return
        value = value.args[0]


# Values that depend on no input of the model.


def input_independent(graph: fx.Graph) -> set[str]:
    """Names of the nodes whose values depend on no placeholder; one pass.

    >>> graph = fx.Graph()
    >>> w = graph.get_attr("w")
    >>> x = graph.call_method("add", (graph.placeholder("x"), graph.call_method("neg", (w,))))
    >>> sorted(input_independent(graph))
    ['neg', 'w']
    """
    known: set[str] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if all(source.name in known for source in node.all_input_nodes):
            known.add(node.name)
    return known


# The inputs of a graph that reach a value with their infinities, by way of what passes them on.

InputPart = tuple[fx.Node, tuple[int | str, ...]]  # a placeholder, and keys and positions in it

# Names of operators (function, method or aten) that pass NaN and infinity on.
_PASSING_ON = frozenset(
    "add sub rsub mul div truediv true_divide neg pad float to _to_copy half bfloat16 type_as".split()  # noqa: SIM905
)


def inputs_behind(
    graph_module: fx.GraphModule, values: Iterable[fx.Node], moves: Callable[[Any], bool]
) -> Iterator[InputPart]:
    """The inputs, or parts of them, that ``values`` are: as they come, or after what moves values, converts
    floats or computes with constants (``(x - mean) / std``). Not behind a sum of two values.

    ``moves``: whether an operator moves values.

    >>> from torch import nn
    >>> class Net(nn.Module):
    ...     def forward(self, x, mask):
    ...         y = (x["image"] - 0.5) / 2
    ...         return y + mask
    >>> net = fx.symbolic_trace(Net())
    >>> value = next(node for node in net.graph.nodes if node.name == "truediv")
    >>> list(inputs_behind(net, [value], lambda called: False))
    [(x, ('image',))]
    """
    seen: set[InputPart] = set()
    pending: list[InputPart] = [(value, ()) for value in values]
    while pending:
        node, path = pending.pop()
        if (node, path) in seen:
            continue
        seen.add((node, path))
        if node.op == "placeholder":
            yield node, path
        pending += _sources(graph_module, node, path, moves)


def _sources(
    graph_module: fx.GraphModule,
    node: fx.Node,
    path: tuple[int | str, ...],
    moves: Callable[[Any], bool],
) -> Iterator[InputPart]:
    """The values that ``node`` comes from, if it is not finite wherever they are not."""
    if node.target is operator.getitem:
        source, key = node.args
        if isinstance(source, fx.Node):
            yield source, (key, *path) if isinstance(key, (int, str)) else path
        return
    called = get_module(graph_module, str(node.target)) if node.op == "call_module" else None
    read = [source for source in node.all_input_nodes if source.op != "get_attr"]
    name = node.target if isinstance(node.target, str) else _name(node.target)
    if moves(node.target if called is None else type(called)) or (
        called is None and name in _PASSING_ON and len(read) == 1
    ):
        yield from ((source, ()) for source in read)


def _name(target: Any) -> str:
    return str(getattr(target, "_opname", getattr(target, "__name__", "")))
