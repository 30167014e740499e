"""A trace or an export: which of two plans puts more multiply-adds on integers.

A trace keeps some calls whole that an export takes apart: functions that ``torch.fx.wrap`` names, attention
as a function, layers with hooks. Only where such calls hold multiply-adds is there anything to choose, and
only then is the model exported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from backquant.graph import get_module
from backquant.match import CustomMatching, Plan
from backquant.operators.index import find, find_root

_LEAST = 0.01  # of all multiply-adds, in calls that an export might take apart


def kept_whole(module: fx.GraphModule, plan: Plan, named: CustomMatching) -> list[fx.Node]:
    """The calls that stay float because the trace keeps them whole (layers, wrapped functions), in order.

    Modules that the user asked to leave whole, or to quantize on their own, are not among them.
    """
    return [
        node
        for node in _unknown(module, named)
        if node.name not in plan.decisions or not plan.decisions[node.name].quantized
    ]


def _unknown(module: fx.GraphModule, named: CustomMatching) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op == "call_module":
            called = get_module(module, str(node.target))
            if (
                find_root(type(called)) is None
                and str(node.target) not in named.untraced_names
                and type(called) not in named.untraced_classes
                and next(called.parameters(), None) is not None
            ):
                yield node
        elif (
            node.op == "call_function" and find(node.target) is None and not _is_plain(node.target)
        ):
            yield node


def _is_plain(function: object) -> bool:
    """Operators of Python and of ATen: an export has the same ones."""
    return getattr(function, "__module__", None) in ("_operator", "builtins", "torch._ops", "math")


def worth_an_export(costs: Mapping[str, int], kept: list[fx.Node]) -> bool:
    """Whether calls that were kept whole hold a share of the multiply-adds that counts.

    >>> x, linear, helper, output = fx.symbolic_trace(lambda x: (x @ x) + 1).graph.nodes
    >>> worth_an_export({linear.name: 90, helper.name: 10}, [helper])
    True
    >>> worth_an_export({linear.name: 90}, [helper])
    False
    """
    return sum(costs.get(node.name, 0) for node in kept) > _LEAST * sum(costs.values())


def on_integers(plan: Plan, costs: Mapping[str, int]) -> int:
    """Multiply-adds of what ``plan`` quantizes."""
    decisions = plan.decisions
    return sum(n for name, n in costs.items() if name in decisions and decisions[name].quantized)


def described(module: fx.GraphModule, node: fx.Node) -> str:
    """A call for a note.

    >>> gm = fx.symbolic_trace(lambda x: x + 1)
    >>> described(gm, list(gm.graph.nodes)[1])
    "the function 'add'"
    """
    if node.op == "call_module":
        return f"{node.target!r} ({type(get_module(module, str(node.target))).__name__})"
    return f"the function {getattr(node.target, '__name__', node.target)!r}"
