"""Functions that a trace left whole (``torch.fx.wrap``), taken apart where that is possible.

A wrapped function whose branches hang on constants alone, such as the ``stochastic_depth`` of a model in
evaluation mode, is no more than the operators that it calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from backquant.graph.scope import Scope

_OPERATORS = ("torch.", "backquant.")


def inline_wrapped(
    module: fx.GraphModule, scopes: dict[str, Scope], whole: Collection[Callable[..., Any]] = ()
) -> None:
    """Put operators in the place of calls of functions that are neither torch's nor among ``whole``.

    A function that looks at values or sizes, or draws random numbers, is left.

    >>> def twice(x, times):
    ...     return x * 2 if times == 2 else x
    >>> twice.__module__ = "somebody"
    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.call_function(twice, (graph.placeholder("x"), 2)))
    >>> module = fx.GraphModule({}, graph)
    >>> inline_wrapped(module, {})
    >>> [node.name for node in module.graph.nodes]
    ['x', 'mul', 'output']
    """
    for node in list(module.graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, FunctionType) or target in whole:
            continue
        if f"{target.__module__}.".startswith(_OPERATORS):
            continue
        scope = scopes.get(node.name)
        made = inline_call(module.graph, node)
        if made is not None and scope is not None:
            scopes.pop(node.name)
            scopes.update((new.name, scope) for new in made)


def inline_call(graph: fx.Graph, node: fx.Node) -> list[fx.Node] | None:
    """Replace the call ``node`` of a function by the operators that it calls, and return them.

    ``None``, and nothing is changed, where the function cannot be taken apart.
    """
    body = _body(node)
    if body is None:
        return None
    inner = [n for n in body.nodes if n.op == "placeholder"]
    known: dict[fx.Node, fx.Node] = dict(zip(inner, node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        result = graph.graph_copy(body, known)
    assert isinstance(result, fx.Node)
    made = [known[n] for n in body.nodes if n.op not in ("placeholder", "output")]
    for new in made:
        new.stack_trace = node.stack_trace
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return made


def _body(node: fx.Node) -> fx.Graph | None:
    """What the function does with these arguments, one placeholder for each of ``node``'s inputs."""
    body = fx.Graph()
    tracer = GraphAppendingTracer(body)
    proxies: dict[fx.Node, Any] = {
        n: fx.Proxy(body.placeholder(n.name), tracer) for n in node.all_input_nodes
    }
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxies.__getitem__)
    assert callable(node.target)
    dice, drawn = random.getstate(), torch.get_rng_state()
    try:
        result = node.target(*args, **kwargs)
    except Exception:  # user code that needs values: the call stays a node
        return None
    finally:
        is_random = random.getstate() != dice or not torch.equal(torch.get_rng_state(), drawn)
        random.setstate(dice)
        torch.set_rng_state(drawn)
    if is_random or not isinstance(result, fx.Proxy):
        return None
    body.output(result.node)
    return body
