"""Arguments of a model as runtimes and compilers take them: by position, tensors in containers, no classes.

The cache of keys and values of a decoder is an object of its library. In a file for another runtime each of
its tensors is an input, named after where it stands: ``past_key_values_layers_0_keys``.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from backquant.graph.objects import Shell, object_classes, part


def with_plain_arguments(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with dicts in place of objects, which ``module`` is made to read, in place.

    Args:
        module: a graph that reads the parts of objects with ``getattr``, as captures write it.
        args: positional arguments of it, objects of any class among them.
        kwargs: keyword arguments.

    >>> import types, torch
    >>> graph = fx.Graph()
    >>> cache = graph.placeholder("cache")
    >>> _ = graph.output(graph.call_function(getattr, (cache, "keys")))
    >>> module = fx.GraphModule({}, graph)
    >>> args, _ = with_plain_arguments(module, (types.SimpleNamespace(keys=torch.ones(1)),), {})
    >>> args, module(*args)
    (({'keys': tensor([1.])},), tensor([1.]))
    """
    values = [*args, *kwargs.values()]
    if not any(map(object_classes, values)):
        return args, dict(kwargs)
    places = list(module.graph.find_nodes(op="placeholder"))
    by_name = {str(node.target): node for node in places}
    given = [*zip(places, args, strict=False)]
    given += [(by_name[name], value) for name, value in kwargs.items() if name in by_name]
    for node, value in given:
        _read_items(node, value)
    module.recompile()
    return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}


def plain(value: Any) -> Any:
    """``value`` with a dict in place of each object in it.

    >>> import types, torch
    >>> plain([types.SimpleNamespace(keys=torch.ones(1)), 2])
    [{'keys': tensor([1.])}, 2]
    """
    if isinstance(value, (list, tuple)) and object_classes(value):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if object_classes(value):
        parts, shell = Shell.of(value)
        return dict(zip(shell.names, map(plain, parts), strict=True))
    return value


def by_position(
    signature: Sequence[tuple[str, Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """All arguments by position, defaults between those that are given.

    ``torch.export`` takes the keyword arguments of a graph module for those that come next.

    Args:
        signature: each argument with its default, from ``arguments_of``.

    Raises ``TypeError`` for arguments that are not in ``signature``, or are missing.

    >>> by_position([("ids", None), ("cache", None), ("mask", None), ("last", 0)], (), {"ids": 1, "mask": 2})
    (1, None, 2)
    """
    defaults = dict(signature)
    names = list(defaults)
    unknown = [name for name in kwargs if name not in names[len(args) :]]
    if unknown or len(args) > len(names):
        raise TypeError(f"no such arguments: {unknown or len(args)}")
    count = max([len(args), *(names.index(name) + 1 for name in kwargs)])
    rest = [kwargs.get(name, defaults[name]) for name in names[len(args) : count]]
    if any(value is inspect.Parameter.empty for value in rest):
        raise TypeError("an argument is missing")
    return *args, *rest


def arguments_of(graph: fx.Graph) -> list[tuple[str, Any]]:
    """What a graph takes, in order, each with its default, or ``inspect.Parameter.empty``.

    >>> graph = fx.Graph()
    >>> _ = graph.placeholder("x"), graph.placeholder("mask", default_value=None)
    >>> arguments_of(graph)
    [('x', <class 'inspect._empty'>), ('mask', None)]
    """
    return [
        (str(node.target), node.args[0] if node.args else inspect.Parameter.empty)
        for node in graph.find_nodes(op="placeholder")
    ]


def _read_items(node: fx.Node, value: Any) -> None:
    """Make what reads ``value``, the value of ``node``, read the dict that it becomes."""
    if not object_classes(value):
        return
    for user in list(node.users):
        if user.op != "call_function" or not user.args or user.args[0] is not node:
            continue
        if user.target in (getattr, part):
            name = str(user.args[1])
            _read_items(user, part(value, name))
            user.target = operator.getitem
        elif user.target is operator.getitem:
            _read_items(user, value[user.args[1]])
