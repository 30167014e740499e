"""The one rewriter of captured graphs.

A rule is a function of a node and the ``GraphRewriter``. It returns the node that stands for that node from
now on; that node itself, where it was changed in place; or ``None``, where the rule does not apply.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph.edit import NamePool, get_module
from backquant.graph.in_place import changed_tensors, changes_argument, is_view
from backquant.graph.provenance import Scope
from backquant.graph.queries import GraphIndex, input_independent
from backquant.graph.shapes import GraphValues, TensorFacts

_SIZES = ("size", getattr, operator.getitem)


class GraphRewriter:
    """Rewrites one graph in place. New nodes have the scopes of those that they stand for.

    Args:
        module: a captured graph in evaluation mode.
        scopes: of its nodes, by name.
        values: shapes and dtypes of its tensors; ``None``: nothing is known.
        kept: operators that stay as they are.

    >>> def negated(node, write):
    ...     return write.call(node, torch.neg, node.args[0]) if node.target == "neg" else None
    >>> module = fx.symbolic_trace(lambda x: x.neg() + 1)
    >>> GraphRewriter(module).apply(negated), module.graph.find_nodes(op="call_method")
    (1, [])
    """

    def __init__(
        self,
        module: fx.GraphModule,
        scopes: dict[str, Scope] | None = None,
        values: GraphValues | None = None,
        kept: Collection[Any] = (),
    ) -> None:
        self.module, self.graph, self.kept = module, module.graph, kept
        self.scopes = {} if scopes is None else scopes
        self.names = NamePool(module)
        self._values = values
        self.memo: dict[Any, str] = {}  # what a rule keeps between nodes
        self._replaced: dict[fx.Node, str] = {}  # names that nodes stand for

    @cached_property
    def constants(self) -> Constants:
        return Constants(self.module)

    @cached_property
    def independent(self) -> set[str]:
        """The names of nodes that depend on no input."""
        return input_independent(self.graph)

    @cached_property
    def times(self) -> Counter[nn.Module]:
        """How often the graph calls each module."""
        calls = self.graph.find_nodes(op="call_module")
        return Counter(get_module(self.module, str(node.target)) for node in calls)

    def apply(self, *rules: Callable[[fx.Node, GraphRewriter], fx.Node | None]) -> int:
        """Try each rule at every node but operators that are kept, in graph order; how often one applied."""
        count = 0
        for rule in rules:
            for node in list(self.graph.nodes):
                made = None if node._erased or node.target in self.kept else rule(node, self)
                count += made is not None
                if made is not None and made is not node and not node._erased:
                    self.replace(node, made)
        if count:
            self.module.recompile()
        return count

    def called(self, node: fx.Node) -> nn.Module | None:
        """The module that ``node`` calls."""
        return get_module(self.module, str(node.target)) if node.op == "call_module" else None

    def facts(self, node: fx.Node) -> TensorFacts | None:
        """Shape and dtype of what ``node`` gives, where they are known."""
        return (
            None if self._values is None else self._values.of(self._replaced.get(node, node.name))
        )

    def call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function, or of a method by name, before ``node`` and in its scope."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        return self._insert(node, kind, target, args, kwargs)

    def follow(self, node: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
        """A call of a function of ``node`` and ``args``, which other readers of ``node`` read instead."""
        made = self.call(node, target, *args)
        node.append(made)
        node.replace_all_uses_with(made)
        made.args, made.meta = (node, *args), dict(node.meta)
        return made

    def buffer(self, node: fx.Node, prefix: str, tensor: torch.Tensor) -> fx.Node:
        """A new buffer, which is read before ``node``."""
        path = self.names.take(prefix)
        self.module.register_buffer(path, tensor)
        return self.read(node, path)

    def read(self, node: fx.Node, path: str) -> fx.Node:
        """What is at a path, read before ``node``."""
        return self._insert(node, "get_attr", path)

    def submodule(self, node: fx.Node, prefix: str, module: nn.Module, *args: Any) -> fx.Node:
        """A call of a new module before ``node``."""
        path = self.names.take(prefix)
        self.module.add_module(path, module)
        return self._insert(node, "call_module", path, args)

    def _insert(
        self, node: fx.Node, kind: str, target: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> fx.Node:
        with self.graph.inserting_before(node):
            made = self.graph.create_node(kind, target, args, kwargs)
        self.scopes[made.name] = self.scopes.get(node.name, Scope("", None))
        if node.stack_trace:
            made.stack_trace = node.stack_trace
        return made

    def retarget(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Let ``node`` call something else, under the same name."""
        read = node.all_input_nodes
        node.target, node.args, node.kwargs = target, args, kwargs
        self._erase_unread(read)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let readers of ``old`` read ``new``, and erase it."""
        new.meta.update(old.meta)
        self._replaced[new] = self._replaced.get(old, old.name)
        old.replace_all_uses_with(new)
        self.erase(old)

    def erase(self, node: fx.Node) -> None:
        """Erase what nobody reads, and the constants and sizes that only it read."""
        read = node.all_input_nodes
        self.graph.erase_node(node)
        self.scopes.pop(node.name, None)
        self._erase_unread(read)

    def _erase_unread(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if (
                not node._erased
                and not node.users
                and (node.op == "get_attr" or node.target in _SIZES)
            ):
                self.erase(node)


class Constants:
    """The floating-point tensors that a graph reads and nothing changes.

    >>> Constants(fx.symbolic_trace(torch.nn.ReLU())).value(None) is None
    True
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._changed = changed_tensors(module)

    def value(self, node: object) -> torch.Tensor | None:
        held = self.held(node)
        return held if held is not None and held.is_floating_point() else None

    def held(self, node: object) -> torch.Tensor | None:
        """A tensor of any dtype."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        if str(node.target) in self._changed:
            return None
        value = attrgetter(str(node.target))(self._module)
        return value if isinstance(value, torch.Tensor) else None


def only_reader(node: fx.Node) -> fx.Node | None:
    """The call that alone reads ``node``; ``None``: several do, or none, or the output.

    >>> x, neg, output = fx.symbolic_trace(lambda x: x.neg()).graph.nodes
    >>> only_reader(x), only_reader(neg)
    (neg, None)
    """
    reader = next(iter(node.users), None)
    is_only = reader is not None and len(node.users) == 1 and reader.op.startswith("call_")
    return reader if is_only else None


def arguments_by_name(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments of a call whose positional ones have these names.

    >>> _, add, _ = fx.symbolic_trace(lambda x: torch.add(x, 1, alpha=2)).graph.nodes
    >>> arguments_by_name(add, "input", "other")
    {'input': x, 'other': 1, 'alpha': 2}
    """
    return dict(zip(names, node.args, strict=False)) | node.kwargs


# Products that a model computes twice, of the same values with the same weights, computed once.
#
# A spiking network calls a convolution at each step on the same image. A runtime finds such calls and
# computes them once, under one of their names: the others seemed to have no kernel. Here they are one
# operator from the start, on all engines.

_MODULES = (
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, torch.bmm, torch.mm),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, operator.matmul),
        *("matmul", "bmm", "mm"),
    }
)
_PURE = ("torch.", "_operator", "operator", "builtins", "_VariableFunctions")
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "exponential")


def computed_once(
    module: fx.GraphModule, scopes: Mapping[str, Scope], kept: Collection[Any] = ()
) -> int:
    """Let one product stand for all that are equal to it and in the same module, in place; how many are gone.
    Operators in ``kept`` stay.

    1. Equal are calls of one layer, or of one function, with equal arguments; arguments are equal that are
       computed alike from the same values by operators that draw no random numbers and change nothing.
    2. What is written to at some place is not shared, and nothing is that reads it.

    >>> module = fx.symbolic_trace(lambda x, y: torch.matmul(x, y).relu() + torch.matmul(x, y).sin())
    >>> computed_once(module, {}), [node.name for node in module.graph.nodes]
    (1, ['x', 'y', 'matmul', 'relu', 'sin', 'add', 'output'])
    """
    index = GraphIndex(module)
    values = _Values(module, index)
    first: dict[Any, fx.Node] = {}
    count = 0
    for node in list(module.graph.nodes):
        number = values.of(node)
        if (
            not _is_product(node, index)
            or node.target in kept
            or type(index.module_of(node)) in kept
        ):
            continue
        scope = scopes.get(node.name)
        one = first.setdefault((number, scope.path if scope else ""), node)
        if one is node:
            continue
        above = node.all_input_nodes
        node.replace_all_uses_with(one)
        module.graph.erase_node(node)
        _drop(above, index)
        count += 1
    if count:
        module.recompile()
    return count


class _Values:
    """Numbers for what nodes compute: equal numbers, equal values."""

    def __init__(self, module: fx.GraphModule, index: GraphIndex) -> None:
        self._index = index
        self._written = _written(module.graph, index)
        self._numbers: dict[fx.Node, int] = {}
        self._known: dict[Any, int] = {}

    def of(self, node: fx.Node) -> int:
        """The number of ``node``; what it reads has one."""
        number = self._numbers[node] = self._number(node)
        return number

    def _number(self, node: fx.Node) -> int:
        key: Any = node
        changes = node in self._written or not self._written.isdisjoint(node.all_input_nodes)
        if not changes and _is_pure(node, self._index):
            read = fx.node.map_arg((node.args, node.kwargs), lambda a: _Value(self._numbers[a]))
            key = (node.op, node.target, _plain(read))
        return self._known.setdefault(key, len(self._known))


def _written(graph: fx.Graph, index: GraphIndex) -> set[fx.Node]:
    """What is written to at some place: by itself, or in memory that it shares with such a value."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        called = index.module_of(node)
        if changes_argument(node, called) or (node in found and is_view(node, called)):
            found.update(node.all_input_nodes)
    targets = {node.target for node in found if node.op == "get_attr"}
    for node in graph.nodes:
        called = index.module_of(node)
        shares = is_view(node, called) or changes_argument(node, called)
        if (node.op == "get_attr" and node.target in targets) or (
            shares and not found.isdisjoint(node.all_input_nodes)
        ):
            found.add(node)
    return found


class _Value(int):
    """The number of what a node reads, told apart from numbers that are written out."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _plain(read: Any) -> str:
    """Arguments as words, tensors by their identity."""
    return repr(torch.utils._pytree.tree_map_only(torch.Tensor, id, read))


def _is_product(node: fx.Node, index: GraphIndex) -> bool:
    if node.op == "call_module":
        return _is_pure(node, index)
    return node.op in ("call_function", "call_method") and node.target in _FUNCTIONS


def _is_pure(node: fx.Node, index: GraphIndex) -> bool:
    """Whether the node gives the same value for the same arguments, and does nothing else."""
    called = index.module_of(node)
    if node.op == "get_attr":
        return True
    if node.op == "call_module":
        return type(called) in _MODULES and not _hooks(called)
    if node.op not in ("call_function", "call_method") or changes_argument(node, called):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        seeded = torch.Tag.nondeterministic_seeded in node.target.tags
        return node.target.namespace == "aten" and not seeded and not node.target._schema.is_mutable
    name = str(getattr(node.target, "__name__", node.target))
    if any(word in name for word in _RANDOM) or name.startswith("empty"):
        return False
    home = str(getattr(node.target, "__module__", None) or "torch.")
    return node.op == "call_method" or f"{home}.".startswith(_PURE)


def _hooks(module: nn.Module | None) -> bool:
    return bool(
        getattr(module, "_forward_hooks", None) or getattr(module, "_forward_pre_hooks", None)
    )


def _drop(nodes: list[fx.Node], index: GraphIndex) -> None:
    """Erase what nobody reads any more."""
    while nodes:
        node = nodes.pop()
        if not node.users and not node._erased and _is_pure(node, index):
            nodes += node.all_input_nodes
            node.graph.erase_node(node)
