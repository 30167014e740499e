"""What a model returns as runtimes and compilers give it: tensors in tuples, lists and dicts, no classes.

A model may return flags, numbers and text beside its tensors. A file for another runtime gives tensors alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from backquant.graph.clone import with_own_state
from backquant.graph.objects import fresh

_NUMBERS = (bool, int, float)


def with_plain_outputs(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Make ``module`` return tensors, in place: numbers become tensors of no axes (``float64``, ``int64``,
    ``bool``; sizes stay numbers), text and other constants ``None``, named tuples dicts, and what
    ``torch.max`` and its like give a tuple.

    Args:
        module: any graph, which nobody else uses.
        args, kwargs: what it is called with to see which of its results are tensors.

    >>> graph = fx.Graph()
    >>> _ = graph.output({"scores": graph.placeholder("x"), "scale": 0.5, "task": "ner"})
    >>> module = fx.GraphModule({}, graph)
    >>> with_plain_outputs(module, (torch.ones(1),), {})
    >>> module(torch.ones(1))
    {'scores': tensor([1.]), 'scale': tensor(0.5000, dtype=torch.float64), 'task': None}
    """
    output = module.graph.output_node()
    given = output.args[0]
    made = list(filter(_is_named, output.all_input_nodes))
    opened = fx.node.map_arg(given, _parts)
    values = _values(module, opened, args, kwargs)
    with module.graph.inserting_before(output):
        output.args = (_plain(module.graph, opened, values),)
    _erase_unread(made)
    module.recompile()


def _is_named(node: fx.Node) -> bool:
    """Whether a node makes a named tuple: ``torch.fx`` records calls of their classes."""
    kind = node.target
    is_class = node.op == "call_function" and isinstance(kind, type) and issubclass(kind, tuple)
    return is_class and hasattr(kind, "_fields")


def _parts(node: fx.Node) -> Any:
    if not _is_named(node):
        return node
    made: Any = node.target
    return fx.node.map_arg(made(*node.args, **node.kwargs), _parts)


def _values(
    module: fx.GraphModule, opened: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[fx.Node, Any]:
    """What the nodes in ``opened`` give on these arguments, but for those that surely give a tensor."""
    output = module.graph.output_node()
    output.args, given = ((opened,), output.args)
    nodes = [node for node in output.all_input_nodes if not _gives_a_tensor(node)]
    output.args = (nodes,)
    try:
        if not nodes:
            return {}
        module.recompile()
        given_now = fresh((args, dict(kwargs)))
        own_args, own_kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, given_now)
        with torch.no_grad(), with_own_state(module):
            return dict(zip(nodes, module(*own_args, **own_kwargs), strict=True))
    finally:
        output.args = given


def _gives_a_tensor(node: fx.Node) -> bool:
    if node.op == "placeholder" or not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "get_attr"
    returns = node.target._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)


def _plain(graph: fx.Graph, value: Any, values: Mapping[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return _plain_node(graph, value, values.get(value))
    if isinstance(value, dict):
        return {key: _plain(graph, item, values) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(type(value)._fields, value, strict=True)
        return {name: _plain(graph, item, values) for name, item in pairs}
    if isinstance(value, (list, tuple)):
        items = [_plain(graph, item, values) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, _NUMBERS):
        return _tensor(graph, value, value)
    return None


def _plain_node(graph: fx.Graph, node: fx.Node, value: Any) -> Any:
    """``node`` in an output, or what stands for it there, by its ``value`` on the example inputs."""
    if isinstance(value, float):
        return _tensor(graph, node, value)
    if isinstance(value, (str, torch.dtype, torch.device)):
        return None
    names = getattr(type(value), "_fields", None)
    is_fields = hasattr(value, "n_fields")  # of torch.return_types
    if not isinstance(value, tuple) or not (is_fields or names):
        return node
    items = [graph.call_function(operator.getitem, (node, i)) for i in range(len(value))]
    inner = dict(zip(items, value, strict=True))
    plain = [_plain_node(graph, item, inner[item]) for item in items]
    return dict(zip(names, plain, strict=True)) if names else tuple(plain)


def _tensor(graph: fx.Graph, number: Any, value: float) -> fx.Node:
    """``number``, which is ``value`` on the example inputs, as a tensor of no axes."""
    dtype = torch.float64 if isinstance(value, float) else torch.tensor(value).dtype
    if not isinstance(number, fx.Node):
        return graph.call_function(torch.full, ((), number), {"dtype": dtype})
    return graph.call_function(torch.scalar_tensor, (number,), {"dtype": dtype})


def _erase_unread(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        if not node.users:
            below = list(filter(_is_named, node.all_input_nodes))
            node.graph.erase_node(node)
            _erase_unread(below)
