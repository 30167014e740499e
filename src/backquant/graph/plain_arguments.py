"""Arguments of a model as runtimes and compilers take them: by position, tensors in containers, no classes.

The cache of keys and values of a decoder is an object of its library. In a file for another runtime each of
its tensors is an input, named after where it stands: ``past_key_values_layers_0_keys``.
"""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from backquant.graph.clone import with_own_state
from backquant.graph.objects import Shell, fresh, object_classes, part

_CONTAINERS = frozenset(
    (tuple, list, dict, OrderedDict, defaultdict, deque, immutable_list, immutable_dict, torch.Size)
)


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
    if not _is_opened([*args, *kwargs.values()]):
        return args, dict(kwargs)
    places = list(module.graph.find_nodes(op="placeholder"))
    by_name = {str(node.target): node for node in places}
    given = [*zip(places, args, strict=False)]
    given += [(by_name[name], value) for name, value in kwargs.items() if name in by_name]
    last = places[-1]
    for node, value in given:
        _read_items(node, value, last)
    module.recompile()
    return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}


def plain(value: Any) -> Any:
    """``value`` with a dict in place of each object in it: of each named tuple, each instance of a class that
    is registered with ``torch.utils._pytree``, and each other object.

    >>> import types, torch
    >>> plain([types.SimpleNamespace(keys=torch.ones(1)), 2])
    [{'keys': tensor([1.])}, 2]
    """
    if not _is_opened(value):
        return value
    parts = _opened(value)
    if parts is not None:
        return {name: plain(item) for name, item in parts.items()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return (tuple if isinstance(value, tuple) else list)(map(plain, value))


def plain_shapes(
    dynamic_shapes: Any, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """``dynamic_shapes`` for the ``plain`` arguments, of which ``names`` has the names.

    For a named tuple it may have a tuple, a list, or a dict by field; for other objects a list or a dict.

    >>> from collections import namedtuple
    >>> import torch
    >>> state = namedtuple("State", "h c")(torch.ones(2, 3), torch.ones(2, 3))
    >>> plain_shapes({"state": ({0: "batch"}, None)}, ["state"], (state,), {})
    {'state': {'h': {0: 'batch'}, 'c': None}}
    """
    if dynamic_shapes is None or not _is_opened([*args, *kwargs.values()]):
        return dynamic_shapes
    if isinstance(dynamic_shapes, Mapping):
        values = dict(zip(names, args, strict=False)) | dict(kwargs)
        return {name: _plain_shape(each, values.get(name)) for name, each in dynamic_shapes.items()}
    values_in_order = [*args, *kwargs.values()]
    return [_plain_shape(*pair) for pair in zip(dynamic_shapes, values_in_order, strict=False)]


def _plain_shape(shape: Any, value: Any) -> Any:
    if shape is None or not _is_opened(value):
        return shape
    parts = _opened(value)
    if parts is None and not isinstance(value, dict):
        made = [_plain_shape(*pair) for pair in zip(shape, value, strict=False)]
        return (tuple if isinstance(value, tuple) else list)(made)
    items = value if parts is None else parts
    given = shape if isinstance(shape, Mapping) else dict(zip(items, shape, strict=False))
    return {name: _plain_shape(given.get(name), item) for name, item in items.items()}


def _opened(value: Any) -> dict[Any, Any] | None:
    """The parts of an object by name; ``None`` for tensors, plain values, and plain containers of them."""
    kind: Any = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return dict(zip(kind._fields, tuple(value), strict=True))
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        if kind in _CONTAINERS or node.flatten_with_keys_fn is None:
            return None
        pairs = node.flatten_with_keys_fn(value)[0]
        if not all(isinstance(key, (pytree.GetAttrKey, pytree.MappingKey)) for key, _ in pairs):
            return None
        return {getattr(key, "name", getattr(key, "key", None)): item for key, item in pairs}
    if object_classes(value) and not isinstance(value, (list, tuple, dict)):
        parts, shell = Shell.of(value)
        return dict(zip(shell.names, parts, strict=True))
    return None


def _is_opened(value: Any) -> bool:
    """Whether there is something in ``value`` that ``_opened`` takes apart."""
    if isinstance(value, torch.Tensor):
        return False
    if _opened(value) is not None:
        return True
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (list, tuple, dict)) and any(map(_is_opened, items))


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


def _read_items(node: fx.Node, value: Any, last: fx.Node) -> None:
    """Make what reads ``value``, the value of ``node``, read the dict that it becomes; ``last`` is the last
    of the arguments, or ``node`` itself."""
    if not _is_opened(value):
        return
    parts = _opened(value)
    others = []
    for user in list(node.users):
        key = _key_read(user, node, value)
        if parts is None and key is not None:
            _read_items(user, value[key], user)
        elif parts is not None and key in parts:
            user.target, user.args = operator.getitem, (node, key)
            _read_items(user, parts[key], user)
        else:
            others.append(user)
    if others and isinstance(value, tuple) and parts is not None:
        _rebuild(node, value, others, last)


def _key_read(user: fx.Node, node: fx.Node, value: Any) -> Any:
    """Which part of ``value``, the value of ``node``, ``user`` reads; ``None``: the whole, or a slice."""
    if user.op != "call_function" or len(user.args) < 2 or user.args[0] is not node:
        return None
    key = user.args[1]
    if user.target in (getattr, part):
        return key
    if user.target is not operator.getitem or isinstance(key, (slice, fx.Node)):
        return None
    return value._fields[key] if hasattr(value, "_fields") else key


def _rebuild(node: fx.Node, value: Any, users: Sequence[fx.Node], last: fx.Node) -> None:
    """``users`` take the named tuple ``value`` as a whole: one is made for them of its parts."""
    items = []
    for name in value._fields:
        with node.graph.inserting_after(last):
            last = node.graph.call_function(operator.getitem, (node, name))
        _read_items(last, getattr(value, name), last)
        items.append(last)
    whole = type(value)(*items)
    for user in users:
        given = fx.node.map_arg((user.args, user.kwargs), lambda n: whole if n is node else n)
        user.args, user.kwargs = given


# What a model returns as runtimes and compilers give it: tensors in tuples, lists and dicts, no classes.
#
# A model may return flags, numbers and text beside its tensors. A file for another runtime gives tensors
# alone.

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
