"""Objects among the arguments of a model as dicts: runtimes take tensors in containers, and no classes.

The cache of keys and values of a decoder is an object of its library. In a file for another runtime each of
its tensors is an input, named after where it stands: ``past_key_values_layers_0_keys``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from backquant.graph.objects import Shell, object_classes, part

__all__ = ["with_plain_arguments"]


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
    return tuple(map(_plain, args)), {name: _plain(value) for name, value in kwargs.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and object_classes(value):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if object_classes(value):
        parts, shell = Shell.of(value)
        return dict(zip(shell.names, map(_plain, parts), strict=True))
    return value


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
