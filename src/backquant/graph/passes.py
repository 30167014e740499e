"""Named steps that state what they require and ensure; what goes wrong inside of one names it.

A contract is a few small functions over the arguments of the step (and its result) that name the first
nodes which are not as they should be, each linear in the graph:

>>> def has_nodes(graph):
...     if not graph:
...         yield Breach("the graph", "one node or more")
>>> @contract(requires=[has_nodes])
... def first_node(graph):
...     return graph[0]
>>> run_pass(first_node, ["x"])
'x'
>>> run_pass(first_node, [])
Traceback (most recent call last):
backquant.errors.PassError: the graph: expected one node or more
  where  before pass 'first node'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import fx

from backquant.errors import BackquantError, PassError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Step = TypeVar("Step", bound=Callable[..., Any])


class Breach(NamedTuple):
    """A node, or an entry of the record, at which a graph is not as a contract says."""

    node: str
    expected: str


Clause = Callable[..., Iterable[Breach]]


class _Contract(NamedTuple):
    requires: tuple[Clause, ...] = ()
    ensures: tuple[Clause, ...] = ()


_CONTRACTS: dict[Callable[..., Any], _Contract] = {}


def contract(
    *, requires: Sequence[Clause] = (), ensures: Sequence[Clause] = ()
) -> Callable[[Step], Step]:
    """State what a step requires and ensures; ``run_pass`` checks it, a plain call does not.

    ``requires``: called with the arguments of the step; ``ensures``: with its result, then the arguments.
    """

    def stated(step: Step) -> Step:
        _CONTRACTS[step] = _Contract(tuple(requires), tuple(ensures))
        return step

    return stated


@contextmanager
def graph_pass(name: str) -> Iterator[None]:
    """One step of conversion or lowering.

    Errors about what the user asked (``BackquantError``) pass through; all else is a defect of the step and
    becomes a ``PassError`` with its name.

    >>> with graph_pass("fold constants"):
    ...     {}["x"]
    Traceback (most recent call last):
    backquant.errors.PassError: KeyError: 'x'
      where  pass 'fold constants'
    """
    try:
        yield
    except BackquantError:
        raise
    except Exception as error:
        raise PassError(f"{type(error).__name__}: {error}", where=f"pass {name!r}") from error


def run_pass(
    step: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """``step(*args, **kwargs)`` as the pass of its own name, with its contract checked.

    Raises ``PassError`` for a defect of the step, and where its contract does not hold: the error names the
    pass, the node, and what was expected of it.

    >>> def fold_constants(found):
    ...     return found["x"]
    >>> run_pass(fold_constants, {"x": 1})
    1
    """
    name = getattr(step, "__name__", repr(step)).strip("_").replace("_", " ")
    stated = _CONTRACTS.get(step, _NOTHING)
    with graph_pass(name):
        for clause in stated.requires:
            _check(clause(*args, **kwargs), f"before pass {name!r}")
        result = step(*args, **kwargs)
        for clause in stated.ensures:
            _check(clause(result, *args, **kwargs), f"after pass {name!r}")
    return result


_NOTHING = _Contract()


def _check(found: Iterable[Breach], where: str) -> None:
    first = next(iter(found), None)
    if first is not None:
        raise PassError(f"{first.node}: expected {first.expected}", where=where)


# Graphs that go without the cyclic garbage collector.


def released(module: fx.GraphModule) -> None:
    """Let the modules of a graph module that is about to be dropped go with it.

    A graph refers to its module, and the module to the graph: the collector has to find that nobody
    else does, among all that was made meanwhile. Without the one reference, ``module`` works as before.

    >>> import weakref
    >>> module = fx.symbolic_trace(lambda x: x)
    >>> watched = weakref.ref(module)
    >>> released(module)
    >>> del module
    >>> watched() is None
    True
    """
    module._graph.owning_module = None


# Is a graph module well formed?


def complaints(module: fx.GraphModule) -> list[str]:
    """What is wrong with a graph module, one sentence each; empty when it is well formed.

    1. The graph has one output, and it is the last node.
    2. Each node uses nodes of this graph that stand before it, and names are unique.
    3. Each ``call_module`` and ``get_attr`` target resolves.

    >>> import torch
    >>> gm = fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    >>> del gm._modules["0"]
    >>> complaints(gm)
    ["_0 calls the missing module '0'"]
    """
    found: list[str] = []
    seen: set[fx.Node] = set()
    names: set[str] = set()
    modules = dict(module.named_modules(remove_duplicate=False))
    outputs = 0
    last: fx.Node | None = None
    for node in module.graph.nodes:
        if node.name in names:
            found.append(f"two nodes are named {node.name!r}")
        if any(source not in seen for source in node.all_input_nodes):
            late = [s.name for s in node.all_input_nodes if s not in seen]
            found.append(f"{node.name} uses {', '.join(late)} before it is computed")
        if node.op == "call_module" and node.target not in modules:
            found.append(f"{node.name} calls the missing module {node.target!r}")
        if node.op == "get_attr" and not _resolves(module, str(node.target)):
            found.append(f"{node.name} reads the missing attribute {node.target!r}")
        outputs += node.op == "output"
        names.add(node.name)
        seen.add(node)
        last = node
    if outputs != 1 or last is None or last.op != "output":
        found.append(f"the graph has {outputs} outputs, or the output is not last")
    return found


def verify(module: fx.GraphModule, *, after: str) -> None:
    """Raise ``PassError`` naming the step ``after`` which the graph is not well formed."""
    found = complaints(module)
    if found:
        raise PassError(f"the graph is broken: {found[0]}", where=f"after {after}")
    try:
        module.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the graph is broken: {error}", where=f"after {after}") from error


def _resolves(module: fx.GraphModule, target: str) -> bool:
    owner: Any = module
    for name in target.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True
