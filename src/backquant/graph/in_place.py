"""Calls in place in a symbolic trace: what reads the changed value later reads the call's result.

A trace records ``F.relu(x, inplace=True)`` as a call like any other, and readers of ``x`` behind it read
``x``: in the model the changed one. Once quantize nodes stand between the two they are two tensors, and the
change would be lost.

1. Later readers of the changed value read the result instead; the call itself stays as it was written.
2. Where another value shares the changed one's memory (``x[:, :4].mul_(2)``, an ``nn.Identity`` before the
   change) and is read later, no result stands for it: ``lost_change`` names the call.
3. ``x += y`` changes a tensor, and gives numbers, shapes and lists a new value. ``Changeable`` notes such
   calls, which stay the addition that a trace makes of them.
4. ``x[index] = y`` is noted by traces with example inputs: it puts values into a copy, by their places.
5. A tensor that ``forward`` makes without its inputs (``torch.zeros(2, 8)``) is one constant of a trace: what
   writes recorded values into it would write into later calls' tensor too, so ``lost_change`` names the call.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.nn import functional as F

from backquant.graph.edit import get_module

# Which calls change their first argument in place, and whose results share its memory.
#
# 1. In place are: names with one underscore at their end (``relu_``), Python's in-place operators
#    (``x += 1``), and functions and modules with ``inplace=True``.
# 2. Views are recognised by the schema of an aten overload, and by name for everything else. An operator that
#    may return its argument itself (``to``, ``contiguous``, ``dropout``) counts as a view.

_OPERATORS = frozenset(
    {
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
        *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
        *(operator.ilshift, operator.irshift, operator.imatmul, operator.iconcat),
    }
)
_VIEWS = frozenset(
    {
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel"),
        "contiguous",
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
    source = node.args[0] if name == "getitem" else None
    return name in _VIEWS and not (isinstance(source, fx.Node) and _name(source) in _SEVERAL)


def _name(node: fx.Node) -> str:
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


_READ_SIZES = frozenset({"size", "dim", "numel", "nelement", "stride", "ndimension", "item"})
_SIZES = frozenset({"shape", "ndim"})
_OF_SIZES = frozenset({"dtype", "device", "is_cuda", "layout", *_SIZES})
_OF_PYTHON = frozenset({"_operator", "builtins", "math"})
_NUMBERS = frozenset({len, int, float, bool, round, min, max})


class Changeable(fx.Proxy):
    """A value of a trace that may be a tensor; its tracer notes in ``changed`` what changes it by ``+=``."""

    def _changed(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        made = self.tracer.create_proxy("call_function", function, (self, other), {})
        self.tracer.changed.add(made.node)  # type: ignore[attr-defined]
        return made

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.add, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.sub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.mul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.truediv, other)

    def __ifloordiv__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.floordiv, other)

    def __imod__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.mod, other)

    def __ipow__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.pow, other)


def put(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """A copy of ``x`` with ``values`` at ``places``, numbers of elements in their order: ``torch.put``, in
    operators that exporters have.

    >>> put(torch.zeros(2, 2), torch.tensor([1, 2]), torch.ones(2))
    tensor([[0., 1.],
            [1., 0.]])
    """
    flat = torch.scatter(x.flatten(), 0, places.flatten(), values.flatten())
    return flat.reshape(x.shape)


def read_changed_values(
    graph: fx.Graph, root: nn.Module, changed: Collection[fx.Node] = frozenset()
) -> None:
    """Rule 1, in place. ``changed``: calls that rules 3 and 4 noted.

    >>> def twice(x):
    ...     torch.relu_(x)
    ...     return x + 1
    >>> graph = fx.symbolic_trace(twice).graph
    >>> read_changed_values(graph, nn.Module())
    >>> [str(arg) for node in graph.nodes if node.name == "add" for arg in node.args]
    ['relu_', '1']
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node, value in _changes(graph, root, changed):
        for user in list(value.users):
            if position[user] > position[node]:
                user.replace_input_with(value, node)


def lost_change(
    graph: fx.Graph, root: nn.Module, changed: Collection[fx.Node] = frozenset()
) -> str:
    """Rules 2 and 5, once rule 1 was applied: the name of the first such call; ``""`` where there is none.

    >>> def first(x):
    ...     y = x + 1
    ...     y[0].mul_(2)
    ...     return y
    >>> lost_change(fx.symbolic_trace(first).graph, nn.Module())
    'mul_'
    """
    changes = dict(_changes(graph, root, changed))
    base = _memory(graph, root, changes)
    for node in graph.nodes:
        value = changes.get(node) or _written(node)
        if value is not None and _is_made_by_forward(base[value]):
            return str(node.name)
    position = {node: index for index, node in enumerate(graph.nodes)}
    last = {node: _last_reader(node, position) for node in graph.nodes}
    ending: dict[int, list[fx.Node]] = {}
    for node, end in last.items():
        ending.setdefault(end, []).append(node)
    # for each tensor, the number of its aliases that are read later
    is_open: Counter[fx.Node] = Counter()
    for index, node in enumerate(graph.nodes):
        for other in ending.get(index, ()):
            is_open[base[other]] -= int(position[other] < index)
        value = changes.get(node)
        if value is not None and is_open[base[value]] > int(last[value] > index):
            return str(node.name)
        is_open[base[node]] += int(last[node] > index)
    return ""


def _written(node: fx.Node) -> fx.Node | None:
    """What ``z[index] = y`` and ``out=z`` write into."""
    value = node.args[0] if node.target == "__setitem__" else node.kwargs.get("out")
    return value if isinstance(value, fx.Node) else None


def _is_made_by_forward(node: fx.Node) -> bool:
    return node.op == "get_attr" and str(node.target).startswith("_tensor_constant")


def _memory(
    graph: fx.Graph, root: nn.Module, changes: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """For each value the first one whose memory it may share."""
    base: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        called = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        source = node.args[0] if node.args else node.kwargs.get("input")
        is_shared = node in changes or (
            node.op.startswith("call_") and is_view(node, called) and not _reads_only_sizes(node)
        )
        base[node] = base[source] if is_shared and isinstance(source, fx.Node) else node
    return base


def _last_reader(node: fx.Node, position: dict[fx.Node, int]) -> int:
    """The position of the last node that reads the values of ``node``; -1 where none does."""
    readers = (position[user] for user in node.users if not _reads_only_sizes(user))
    return max(readers, default=-1)


def _reads_only_sizes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _READ_SIZES and node.target != "item"
    return node.target is getattr and node.args[1] in _OF_SIZES


def _changes(
    graph: fx.Graph, root: nn.Module, changed: Collection[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each call in place with the value that it changes, in graph order."""
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_number(node, numbers):
            numbers.add(node)
        value = node.args[0] if node.args else node.kwargs.get("input")
        called = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(value, fx.Node):
            continue
        if changes_argument(node, called) or (node in changed and value not in numbers):
            yield node, value


def _is_number(node: fx.Node, numbers: Collection[fx.Node]) -> bool:
    """Whether ``node`` gives a size, or what is computed from ``numbers`` alone."""
    if node.op == "call_method":
        return node.target in _READ_SIZES
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _SIZES
    if node.target in _NUMBERS:
        return True
    of_python = getattr(node.target, "__module__", "") in _OF_PYTHON  # torch.zeros(size) is none
    read = node.all_input_nodes
    return of_python and bool(read) and all(each in numbers for each in read)
