"""The one rewriter of captured graphs.

A rule is a function of a node and the ``GraphRewriter``. It returns the node that stands for that node from
now on; that node itself, where it was changed in place; or ``None``, where the rule does not apply.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from backquant.graph.edit import NamePool, get_module
from backquant.graph.in_place import changed_tensors
from backquant.graph.provenance import Scope
from backquant.graph.queries import input_independent
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
