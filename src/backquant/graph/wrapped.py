"""Functions that a trace left whole (``torch.fx.wrap``), taken apart where that is possible.

A wrapped function whose branches hang on constants alone, such as the ``stochastic_depth`` of a model in
evaluation mode, is no more than the operators that it calls.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from backquant.graph.provenance import Scope

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
        if not _is_wrapped(node) or node.target in whole:
            continue
        scope, read = scopes.get(node.name), list(node.users)
        made = inline_call(module.graph, node)
        if made is not None and scope is not None:
            gone = (node, *(item for item in read if item._erased))
            for each in gone:
                scopes.pop(each.name, None)
            scopes.update((new.name, scope) for new in made)


def _is_wrapped(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, FunctionType):
        return False
    return not f"{target.__module__}.".startswith(_OPERATORS)


def passed_on(node: fx.Node, known: Mapping[fx.Node, Any]) -> fx.Node | None:
    """The input that ``node``, a call of a wrapped function, returns as it is; ``None`` for other calls.

    ``known``: inputs that are constants.

    >>> def drop(x, training):
    ...     return x * 2 if training else x
    >>> drop.__module__ = "somebody"
    >>> graph = fx.Graph()
    >>> node = graph.call_function(drop, (graph.placeholder("x"), flag := graph.placeholder("training")))
    >>> passed_on(node, {flag: False}), passed_on(node, {flag: True})
    (x, None)
    """
    if not _is_wrapped(node):
        return None
    body = _body(node, node.target, known)
    if body is None:
        return None
    inner = (each for each in body.nodes if each.op == "placeholder")
    given = (each for each in node.all_input_nodes if each not in known)
    returned = body.output_node().args[0]
    return next((own for each, own in zip(inner, given, strict=True) if each is returned), None)


def inline_call(
    graph: fx.Graph, node: fx.Node, function: Callable[..., Any] | None = None
) -> list[fx.Node] | None:
    """Replace the call ``node`` of a function by the operators that it calls, and return them.

    ``function``: what it calls, where that is not its target.

    ``None``, and nothing is changed, where the function cannot be taken apart.
    """
    body = _body(node, node.target if function is None else function)
    if body is None:
        return None
    inner = [n for n in body.nodes if n.op == "placeholder"]
    known: dict[fx.Node, fx.Node] = dict(zip(inner, node.all_input_nodes, strict=True))
    is_tuple = isinstance(body.output_node().args[0], (tuple, list))
    if is_tuple and not all(user.target is operator.getitem for user in node.users):
        return None
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(body, known)
    made = [known[n] for n in body.nodes if n.op not in ("placeholder", "output")]
    for new in made:
        new.stack_trace = node.stack_trace
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for item in list(node.users):
            item.replace_all_uses_with(result[item.args[1]])
            graph.erase_node(item)
    graph.erase_node(node)
    return made


def _body(
    node: fx.Node, function: Any, known: Mapping[fx.Node, Any] = MappingProxyType({})
) -> fx.Graph | None:
    """What the function does with these arguments, one placeholder for each of ``node``'s inputs that is not
    ``known``."""
    body = fx.Graph()
    tracer = GraphAppendingTracer(body)
    proxies: dict[fx.Node, Any] = {
        n: known[n] if n in known else fx.Proxy(body.placeholder(n.name), tracer)
        for n in node.all_input_nodes
    }
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxies.__getitem__)
    dice, drawn = random.getstate(), torch.get_rng_state()
    try:
        result = function(*args, **kwargs)
    except Exception:  # user code that needs values: the call stays a node
        return None
    finally:
        is_random = random.getstate() != dice or not torch.equal(torch.get_rng_state(), drawn)
        random.setstate(dice)
        torch.set_rng_state(drawn)
    items = result if isinstance(result, (tuple, list)) else (result,)
    if is_random or not all(isinstance(item, fx.Proxy) for item in items):
        return None
    nodes = tuple(item.node for item in items)
    body.output(nodes[0] if isinstance(result, fx.Proxy) else nodes)
    return body
