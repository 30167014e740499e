"""A ``torch.fx.Graph`` as a list of nodes in JSON, and back.

A graph that is read is interpreted (``backquant.graph.call_table``) and never compiled. Its names are checked
one by one all the same (``labels.py``) before it is built, and the same checks run when it is written.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

from backquant.artifact import labels
from backquant.artifact.functions import find_function, function_path, is_within
from backquant.artifact.json_values import Decoder, Encoder
from backquant.artifact.labels import check_keyword, shown
from backquant.artifact.operators import check_call, check_method_call
from backquant.errors import ArtifactError
from backquant.graph import part
from backquant.identifiers import label

_CHECKS: dict[str, Callable[[str, str], str]] = {
    "placeholder": labels.check_argument,
    "get_attr": labels.check_path,
    "call_module": labels.check_path,
    "call_method": labels.check_method,
    "output": labels.check_keyword,
}


def encode_graph(graph: Graph, encoder: Encoder, path: str) -> list[dict[str, Any]]:
    """Nodes in order: op, name, target, args, kwargs. Node metadata is not stored.

    >>> graph = torch.fx.symbolic_trace(nn.Identity()).graph
    >>> encode_graph(graph, Encoder(lambda tensor: ""), "")[0]
    {'op': 'placeholder', 'name': 'input_1', 'target': 'input'}
    """
    if type(graph._codegen) is not CodeGen:
        raise ArtifactError(
            f"a graph with its own code generator ({type(graph._codegen).__name__}) cannot be stored",
            where=path or "the model",
            fix="trace the model symbolically: its arguments are then tensors, tuples and dicts",
        )
    prefix = f"{path}: " if path else ""
    return [_encode_node(node, encoder, f"{prefix}node {node.name}") for node in graph.nodes]


def _encode_node(node: Node, encoder: Encoder, where: str) -> dict[str, Any]:
    target = _encode_target(node, encoder, where)
    _check_arguments(node.op, target, node.target, node.args, node.kwargs, encoder.allow, where)
    row: dict[str, Any] = {"op": node.op, "name": node.name, "target": target}
    if node.args:
        row["args"] = encoder.encode(list(node.args), where)
    if node.kwargs:
        row["kwargs"] = {
            labels.check_keyword(key, where): encoder.encode(value, where)
            for key, value in node.kwargs.items()
        }
    return row


def _encode_target(node: Node, encoder: Encoder, where: str) -> str:
    if node.op != "call_function":
        _CHECKS[node.op](str(node.target), where)
        return str(node.target)
    assert callable(node.target)
    try:
        path = function_path(node.target, encoder.allow)
    except ArtifactError as error:
        raise ArtifactError(error.what, where=where, fix=error.fix) from error
    if path == "builtins.getattr" and _reads_an_object(node):
        return "backquant.graph.objects.part"
    _check_getattr(path, node.args, where)
    return path


def _reads_an_object(node: Node) -> bool:
    """Whether an attribute of an object among the arguments is read: ``part`` reads data, and no more."""
    owner, name = node.args
    while isinstance(owner, Node) and owner.target in (getattr, operator.getitem, part):
        owner = owner.args[0]
    is_argument = isinstance(owner, Node) and owner.op == "placeholder"
    is_data = isinstance(name, str) and name.isidentifier() and not labels.is_attribute(name)
    return is_argument and is_data


def _check_getattr(path: str, args: Any, where: str) -> None:
    """An attribute's name must stand in the graph, where it can be seen."""
    if path == "builtins.getattr":
        labels.check_attribute(args[1] if len(args) > 1 else None, where)


def decode_graph(rows: list[dict[str, Any]], decoder: Decoder) -> Graph:
    """The graph, with the very node names that were stored; see ``check_targets`` for the rest.

    Raises ``ArtifactError`` for a name that a graph may not hold.
    """
    graph = Graph()
    nodes: dict[str, Node] = {}
    local = decoder.within(nodes)
    for row in rows:
        node = _decode_node(row, graph, local)
        if node.name != row["name"] or row["name"] in nodes:
            raise ArtifactError(
                f"{row['name']!r} cannot be the name of a node", where=f"node {row['name']}"
            )
        nodes[node.name] = node
    graph.lint()
    return graph


def _decode_node(row: dict[str, Any], graph: Graph, decoder: Decoder) -> Node:
    op, target = row["op"], row["target"]
    where = f"node {labels.check_node(row['name'])}"
    args = tuple(decoder.decode(row.get("args", [])))
    kwargs = {
        labels.check_keyword(key, where): decoder.decode(value)
        for key, value in row.get("kwargs", {}).items()
    }
    if op == "call_function":
        _check_getattr(target, args, where)
        path, target = target, find_function(target, decoder.allow)
        _check_arguments(op, path, target, args, kwargs, decoder.allow, where)
    elif op in _CHECKS:
        target = _CHECKS[op](target, where)
        _check_default(op, args, where)
        _check_arguments(op, target, None, args, kwargs, decoder.allow, where)
    else:
        raise ArtifactError(f"{op!r} is no kind of node", where=where)
    return graph.create_node(op, target, args, kwargs, name=row["name"])


def _check_default(op: str, args: tuple[Any, ...], where: str) -> None:
    """What an argument is without the caller's word stands in the text of a function: it is a literal."""
    if op == "placeholder" and any(isinstance(leaf, Node) for leaf in tree_leaves(args)):
        raise ArtifactError("the default of an argument is no literal", where=where)


def _check_arguments(
    op: str, path: str, target: Any, args: Any, kwargs: Any, allow: tuple[str, ...], where: str
) -> None:
    """Arguments of a call, but for operators that ``allow`` names one by one."""
    if kwargs and not is_within(path, allow):  # the signature of a user's own is theirs
        check_keywords(target if op == "call_function" else None, kwargs, where)
    if path in allow:
        return
    try:
        if op == "call_function":
            check_call(path, target, args, kwargs, where)
        elif op == "call_method":
            check_method_call(path, args, kwargs, where)
    except ArtifactError as error:
        trusted = f"if you trust the file, allow=[{path!r}], to save and to load"
        fix = f"{error.fix}; or, {trusted}" if error.fix else trusted
        raise ArtifactError(error.what, where=error.where, fix=fix) from None


def check_targets(graph: Graph, module: nn.Module, where: str) -> None:
    """Every module that ``graph`` calls is a module of ``module``, every value it reads a tensor."""
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        wanted: type = nn.Module if node.op == "call_module" else torch.Tensor
        if not isinstance(_lookup(module, str(node.target)), wanted):
            raise ArtifactError(
                f"there is no {wanted.__name__.lower()} {labels.shown(label(str(node.target)))}",
                where=f"{where}: node {node.name}".lstrip(": "),
            )


def _lookup(module: nn.Module, path: str) -> Any:
    *owners, name = path.split(".")
    for owner in owners:
        found = module._modules.get(owner)
        if found is None:
            return None
        module = found
    tables = (module._modules, module._parameters, module._buffers, module.__dict__)
    return next((table[name] for table in tables if name in table), None)


# The keywords that a call of a file may have: those of an operator's schema or a function's signature.

# Of torch's Python functions that C++ parses, beside what schemas have.
_ALSO = frozenset(
    {"axis", "axes", "keepdims", "x1", "x2", "data", "requires_grad", "device", "pin_memory"}
)


def check_keywords(
    target: Callable[..., Any] | None, kwargs: Mapping[str, Any], where: str
) -> None:
    """Raises ``ArtifactError`` for a keyword that ``target`` does not have; ``None`` is any method.

    >>> check_keywords(torch.zeros, {"size": [1]}, "node zeros")
    >>> check_keywords(torch.zeros, {"\uff53ize": [1]}, "node zeros")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: '\\uff53ize' is no name of an argument
      where  node zeros
    """
    for name in kwargs:
        check_keyword(name, where)
    wrong = set(kwargs) - _keywords(target) if kwargs else ()
    if wrong:
        raise ArtifactError(f"there is no argument {shown(min(wrong))}", where=where)


@lru_cache(maxsize=4096)
def _keywords(target: Callable[..., Any] | None) -> frozenset[str]:
    if isinstance(target, OpOverload):
        return _names([target._schema])
    if isinstance(target, OpOverloadPacket):
        return _names([getattr(target, name)._schema for name in target.overloads()])
    if isinstance(target, FunctionType):
        named, takes_any = _parameters(target)
        return named | _of_torch() if takes_any else named
    return _of_torch()


def _parameters(function: FunctionType) -> tuple[frozenset[str], bool]:
    """Names of parameters, and whether there may be others."""
    own = inspect.signature(function).parameters.values()
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = frozenset(p.name for p in own if p.kind not in rest)
    return named, len(named) < len(own)


def _names(schemas: list[Any]) -> frozenset[str]:
    return frozenset(argument.name for schema in schemas for argument in schema.arguments)


@cache
def _of_torch() -> frozenset[str]:
    """What ``aten`` schemas and functions of ``torch.nn.functional`` have: of bindings in C++, of methods,
    and of functions that choose another one by their arguments."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    functions = [f for f in vars(nn.functional).values() if isinstance(f, FunctionType)]
    return _names(schemas).union(_ALSO, *(_parameters(f)[0] for f in functions))
