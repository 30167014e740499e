"""Which calls change their first argument in place, and whose results share its memory.

1. In place are: names with one underscore at their end (``relu_``), Python's in-place operators
   (``x += 1``), and functions and modules with ``inplace=True``.
2. Views are recognised by the schema of an aten overload, and by name for everything else. An operator that
   may return its argument itself (``to``, ``contiguous``, ``dropout``) counts as a view.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.nn import functional as F

from backquant.graph.edit import get_module

_OPERATORS = frozenset(
    {
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
        *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
        *(operator.ilshift, operator.irshift, operator.imatmul, operator.iconcat),
    }
)
_VIEWS = frozenset(
    {
        *(
            "view",
            "view_as",
            "reshape",
            "reshape_as",
            "flatten",
            "unflatten",
            "ravel",
            "contiguous",
        ),
        *("transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "getattr"),
        *("unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "detach", "alias"),
        *("getitem", "select", "narrow", "chunk", "split", "tensor_split", "unbind", "unfold"),
        *("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "diagonal"),
        *("as_strided", "real", "imag", "view_as_real", "view_as_complex", "dropout", "data"),
    }
)

# their results are tensors of their own, each with its own memory
_SEVERAL = frozenset({"topk", "sort", "kthvalue", "cummax", "cummin"})


def changes_argument(node: fx.Node, called: nn.Module | None = None) -> bool:
    """Rule 1. ``called``: the module that a ``call_module`` node calls.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> [changes_argument(graph.call_function(f, (x, 2))) for f in (operator.iadd, torch.add)]
    [True, False]
    """
    if node.op == "call_module":
        return getattr(called, "inplace", False) is True
    if node.op == "call_method":
        return _ends_in_place(str(node.target))
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, OpOverload):
        first = target._schema.arguments[:1]
        return any(a.alias_info is not None and a.alias_info.is_write for a in first)
    if target in _OPERATORS or _ends_in_place(getattr(target, "__name__", "")):
        return True
    place = _inplace_position(target)
    given = node.args[place] if place is not None and place < len(node.args) else None
    return given is True or node.kwargs.get("inplace") is True


def _ends_in_place(name: str) -> bool:
    """``relu_``, and not ``__iadd__``."""
    known = hasattr(torch.Tensor, name) or hasattr(F, name)
    return name.endswith("_") and not name.endswith("__") and known


@cache
def _inplace_position(function: Callable[..., Any]) -> int | None:
    """Where a function takes ``inplace``, if it does."""
    if not str(getattr(function, "__module__", "")).startswith("torch.nn.functional"):
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def is_view(node: fx.Node, called: nn.Module | None = None) -> bool:
    """Rule 2: whether the result may share the memory of the first argument.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> is_view(graph.call_method("permute", (x, 1, 0))), is_view(graph.call_method("clone", (x,)))
    (True, False)
    """
    if node.op == "call_module":
        return isinstance(called, (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout))
    target = node.target
    if isinstance(target, OpOverload):
        return any(result.alias_info is not None for result in target._schema.returns)
    name = _name(node)
    is_item = name == "getitem" and isinstance(node.args[0], fx.Node)
    return name in _VIEWS and not (is_item and _name(node.args[0]) in _SEVERAL)


def _name(node: Any) -> str:
    """Of the function or method that is called."""
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def may_change(node: fx.Node) -> bool:
    """Whether a call may change one of its arguments."""
    mutable = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    items = node.target in (operator.setitem, operator.delitem)
    return mutable or items or "out" in node.kwargs or changes_argument(node)


def changed_tensors(module: fx.GraphModule) -> set[str]:
    """The tensors of ``module`` that some call may change: itself, or a view of it."""
    found: set[str] = set()
    viewed: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            viewed[node] = str(node.target)
        first = node.all_input_nodes[0] if node.all_input_nodes else None
        source = viewed.get(first) if first is not None else None
        if source is None:
            continue
        called = get_module(module, str(node.target)) if node.op == "call_module" else None
        changes = may_change(node) or changes_argument(node, called)
        if changes:
            found.add(source)
        if changes or is_view(node, called):
            viewed[node] = source
    return found
