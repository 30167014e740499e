"""The one rewriter of exported programs; new nodes have the ``meta["val"]`` that other passes read.

A rule is a function of a node and of what writes calls before it. It returns the node that stands for that
one from now on, or for the first of its results where nobody reads others; or ``None``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram

from backquant.operators import overload


def sizes_of(node: fx.Node) -> list[Any]:
    """The shape of ``node``, for a view; one symbolic size is -1."""
    shape = list(node.meta["val"].shape)
    symbolic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    if len(symbolic) == 1:
        shape[symbolic[0]] = -1
    return shape


def before(node: fx.Node, target: Any, args: tuple[Any, ...], **more: Any) -> Any:
    """A call before ``node`` that stands for the same operator of the model, with its value's meta.

    Its shape is found as an export finds it: kernels in C++ (of ``constant_pad_nd``) take sizes as numbers,
    and would fix those that are free.
    """
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, more)
    made.meta = dict(node.meta)
    values = torch.utils._pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], args)
    mode = detect_fake_mode((node.meta.get("val"), *values))  # an output node has none
    assert mode is not None
    with mode, enable_python_dispatcher():
        made.meta["val"] = target(*values, **more)
    return made


@dataclass(frozen=True)
class AtenCalls:
    """Writes calls of aten operators before ``node``: ``AtenCalls(node).add(x, y)`` is the node of ``x + y``.

    >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    >>> [x, relu, output] = program.graph.nodes
    >>> doubled = AtenCalls(relu).mul(x, 2.0)
    >>> relu.replace_input_with(x, doubled)
    >>> [str(node.target) for node in program.graph.find_nodes(op="call_function", target=doubled.target)]
    ['aten.mul.Tensor']
    """

    node: fx.Node

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.call, overload(name))

    def call(self, target: Any, *args: Any, **more: Any) -> Any:
        """The node of a call of any other operator."""
        return before(self.node, target, args, **more)


Rule = Callable[[Any, AtenCalls], Any]


class Rules(dict[Any, Rule]):
    """Rules by the overload that they are for."""

    def on(self, *targets: Any) -> Callable[[Rule], Rule]:
        """A decorator of the rule for these: names, as of ``overload_named``, or overloads."""

        def register(rule: Rule) -> Rule:
            self.update((overload_named(t) if isinstance(t, str) else t, rule) for t in targets)
            return rule

        return register


def overload_named(name: str) -> Any:
    """The overload that ``"add.Scalar"`` stands for, or ``"add"``: its usual one.

    >>> overload_named("add.Scalar"), overload_named("relu")
    (<OpOverload(op='aten.add', overload='Scalar')>, <OpOverload(op='aten.relu', overload='default')>)
    """
    return overload(*name.split("."))


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of its operator's schema and in its order, defaults included.

    >>> program = torch.export.export(torch.nn.Softplus(), (torch.ones(2),))
    >>> arguments(program.graph.output_node().args[0][0])
    {'self': input, 'beta': 1.0, 'threshold': 20.0}
    """
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((each.name for each in schema), node.args, strict=False))
    return {each.name: each.default_value for each in schema} | given | dict(node.kwargs)


def operands(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a call, whose types its operator's schema knows."""
    return node.args


def rewrite(program: ExportedProgram, rules: Mapping[Any, Rule]) -> None:
    """Apply each rule to every call of its operator, in graph order, in place; what nobody reads goes.

    >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    >>> rewrite(program, {overload("relu"): lambda node, write: write.clamp_min(node.args[0], 0)})
    >>> [node.name for node in program.graph.nodes]
    ['input', 'clamp_min_default', 'output']
    """
    for node in list(program.graph.nodes):
        rule = rules.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            apply(rule, node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def apply(rule: Rule, node: fx.Node) -> None:
    """One rule at one node."""
    made = rule(node, AtenCalls(node))
    if made is not None:
        replace(node, made)


def first_only(node: fx.Node) -> bool:
    """Whether nobody reads another result of ``node`` than its first one."""
    return all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)


def replace(node: fx.Node, by: Any) -> None:
    """Let all readers of ``node``, or of the first of its results, read ``by``, and remove ``node``."""
    several = (list, tuple)
    if isinstance(node.meta["val"], several) and not isinstance(by.meta["val"], several):
        for item in list(node.users):
            replace(item, by)
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
