"""What a traced model returns, where ``torch.fx`` keeps no class: ordered dicts, dataclasses, output records.

A trace returns tensors in tuples, lists and dicts. The classes around them are kept beside the graph, as
those of an exported model are, and made again when the model was called.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from backquant.graph.objects import Shell
from backquant.graph.structure import Structure, maker, set_output


def keep_returned(module: fx.GraphModule, returned: Any) -> None:
    """Note in ``module`` the classes in ``returned``, what tracing its model gave.

    >>> from backquant.graph.structure import output_of
    >>> graph_module = fx.symbolic_trace(lambda x: {"a": x})
    >>> keep_returned(graph_module, OrderedDict(a=None))
    >>> output_of(graph_module).restored({"a": 1})
    OrderedDict([('a', 1)])
    """
    structure = _structure(returned)
    if structure.has_records:
        set_output(module, structure)


def dataclasses_as_dicts(graph: fx.Graph) -> None:
    """Calls of dataclasses in the output of ``graph`` become dicts of their arguments.

    >>> graph = fx.Graph()
    >>> made = graph.call_function(Shell, kwargs={"cls": graph.placeholder("x"), "names": (), "rest": {}})
    >>> _ = graph.output(made)
    >>> dataclasses_as_dicts(graph)
    >>> print(graph)
    graph():
        %x : [num_users=1] = placeholder[target=x]
        return {'cls': x, 'names': (), 'rest': {}}
    """
    output = graph.output_node()
    made = [node for node in output.all_input_nodes if _makes_dataclass(node)]
    if not made:
        return

    def plain(node: fx.Node) -> Any:
        return fx.node.map_arg(dict(node.kwargs), plain) if _makes_dataclass(node) else node

    output.args = fx.node.map_arg(output.args, plain)
    for node in reversed(graph.nodes):
        if _makes_dataclass(node) and not node.users:
            graph.erase_node(node)


def _makes_dataclass(node: fx.Node) -> bool:
    is_class = node.op == "call_function" and isinstance(node.target, type)
    return is_class and dataclasses.is_dataclass(node.target) and not node.args


def _structure(value: Any) -> Structure:
    kind = type(value)
    if kind in (tuple, list):
        return Structure(kind.__name__, (), tuple(map(_structure, value)))
    if not isinstance(value, dict) and not _is_dataclass(value):
        return Structure("value")
    items = dict(value) if isinstance(value, dict) else _fields(value)
    keys, parts = tuple(items), tuple(map(_structure, items.values()))
    if kind is OrderedDict or (kind in pytree.SUPPORTED_NODES and hasattr(value, "to_tuple")):
        make = maker(kind, list(keys))
    elif _is_dataclass(value) and not isinstance(value, dict):
        make = maker(kind, Shell(kind, keys))
    else:
        return Structure("dict", keys, parts)
    return Structure("record", keys, parts, f"{kind.__module__}.{kind.__qualname__}", make)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
