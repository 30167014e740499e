"""From the aten operators of an exported graph to the spellings that entries of backends use.

An overload belongs to the operator that lists it. Its call is that of the operator's canonical spelling,
with the same arguments, where the record has no call of its own for it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from backquant.graph.export import Call
from backquant.operators.entry import Decomposition
from backquant.operators.index import all_operators, find, gives_truths, overloads
from backquant.operators.operator import Operator

# An operator that decomposition took apart, put together again: by the ``decompositions`` of the records.


def composed(node: fx.Node) -> fx.Node | None:
    """The operator that the calls ending in ``node`` are together, as one call before it, or ``None``.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x, w, b = (graph.placeholder(name) for name in "xwb")
    >>> turned = graph.call_function(torch.ops.aten.permute.default, (w, [1, 0]))
    >>> made = composed(graph.call_function(torch.ops.aten.addmm.default, (b, x, turned)))
    >>> made.target is torch.ops.aten.linear.default, made.args
    (True, (x, w, b))
    """
    is_item = node.target is operator.getitem and bool(node.args[1] == 0)
    last: Any = node.args[0] if is_item else node
    rules = _decompositions().get((getattr(last, "target", None), is_item), ())
    call = next((call for rule in rules if (call := rule.read(last)) is not None), None)
    if call is None:
        return None
    with node.graph.inserting_before(node):
        made = node.graph.call_function(*call)
    made.meta.update(node.meta)
    return made


@cache
def _decompositions() -> dict[tuple[Any, bool], list[Decomposition]]:
    found: dict[tuple[Any, bool], list[Decomposition]] = {}
    for known in all_operators():
        for each in known.decompositions:
            found.setdefault((each.ends_in, each.is_item), []).append(each)
    return found


class AtenSpeller:
    """The table of ``backquant.operators`` as ``backquant.graph`` asks for it.

    >>> speller = AtenSpeller()
    >>> speller.call(torch.ops.aten.add.Tensor, (1, 2), {}).target is operator.add
    True
    >>> speller.call(torch.ops.aten.bmm.default, (1, 2), {}).target is torch.matmul
    True
    """

    def composed(self, node: fx.Node) -> fx.Node | None:
        """See ``backquant.operators.aten``."""
        return composed(node)

    def call(self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """The canonical spelling of a call; ``None`` for an overload that no operator lists."""
        owner = _respelled().get(overload)
        if owner is not None:
            return owner.respelled[overload](*args, **kwargs)
        known = find(overload)
        target = None if known is None else canonical(known)
        if target is None:
            return None
        if isinstance(target, str):
            return Call("call_method", target, args, kwargs)
        if kwargs and target in (operator.add, operator.sub, operator.mul):
            target = getattr(torch, target.__name__)
        return Call("call_function", target, args, kwargs)

    def places(self, overload: Any) -> tuple[int, ...]:
        """The arguments that are places in another one, by position."""
        known = _respelled().get(overload) or find(overload)
        return () if known is None else known.places

    def gives_truths(self, overload: Any) -> bool:
        """See ``backquant.operators.index``."""
        owner = _respelled().get(overload)
        return gives_truths(overload if owner is None else owner.spellings[0])

    def module(
        self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> nn.Module | None:
        """See ``rebuilt_module``."""
        return rebuilt_module(overload, args, kwargs)


def canonical(known: Operator) -> Any:
    """The function, or the name of the method, by which exported graphs show an operator.

    >>> canonical(find("view")), canonical(find(torch.relu)) is torch.nn.functional.relu
    ('view', True)
    """
    return known.exported_as or next(iter((*known.functions, *known.methods)), None)


def rebuilt_module(
    overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> nn.Module | None:
    """The module that does what the call does to its first argument, with the tensors of the call:
    exported programs hold the tensors of a model and not its modules.

    Args:
        overload: an aten operator.
        args, kwargs: of the call; tensors where the model's own stand, anything else for the input.

    Returns ``None`` for an operator without such a module, or with a computed weight.

    >>> weight = torch.ones(3, 2)
    >>> module = rebuilt_module(torch.ops.aten.linear.default, ("x", weight), {})
    >>> module, module.weight.data_ptr() == weight.data_ptr()
    (Linear(in_features=2, out_features=3, bias=False), True)
    """
    owner = _rebuilt().get(overload)
    if owner is not None:
        return owner.rebuilt[overload](*args, **kwargs)
    known = find(overload)
    if known is None or known.as_module is None:
        return None
    return known.as_module(*args[1:], **kwargs)


@cache
def _respelled() -> dict[Any, Operator]:
    return {overload: known for known in all_operators() for overload in known.respelled}


@cache
def _rebuilt() -> dict[Any, Operator]:
    return {overload: known for known in all_operators() for overload in known.rebuilt}


# The aten overload by which a pass writes an operator into an exported graph, or looks for it there.


#: Of operators that no record has, those whose overload is not called ``default``.
_OVERLOADS = {"slice": "Tensor", "to": "dtype", "sym_size": "int"}


@cache
def overload(name: str, which: str = "") -> Any:
    """Of the aten operator ``name``: the overload that its record lists first, or the one called ``which``.

    Raises ``AttributeError`` for a name that PyTorch does not have.

    >>> overload("add"), overload("rsqrt"), overload("conv2d", "padding")
    (<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.rsqrt', overload='default')>, \
<OpOverload(op='aten.conv2d', overload='padding')>)
    """
    if not which and name in _first_overloads():
        return _first_overloads()[name]
    return getattr(getattr(torch.ops.aten, name), which or _OVERLOADS.get(name, "default"))


@cache
def _first_overloads() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for known in all_operators():
        for each in known.aten:
            if each.namespace == "aten":
                found.setdefault(each._opname, each)
    return found


# Windows of poolings in exported programs, no larger than what they move over. Values stay.
#
# In ceil mode PyTorch takes a larger window, and cuts it off (EfficientNet of transformers averages windows
# of 2560). ONNX's runtimes refuse it; Inductor's code and ExecuTorch's kernel go through all of it each
# time.

_POOLS = tuple(f"{kind}_pool{rank}d" for kind in ("avg", "max") for rank in (1, 2, 3))


def cut_windows(graph: fx.Graph) -> None:
    """Cut the windows of ``graph``, in place, where the size is known. A stride that is left out is that of
    the window as given.

    >>> import torch
    >>> pool = torch.nn.AvgPool2d(8, ceil_mode=True)
    >>> graph = torch.export.export(pool, (torch.zeros(1, 2, 3, 9),)).graph
    >>> cut_windows(graph)
    >>> [node.args[1:] for node in graph.nodes if "avg_pool2d" in str(node.target)]
    [([3, 8], [8, 8], [0, 0], True)]
    """
    for pool in overloads(*_POOLS):
        for node in graph.find_nodes(op="call_function", target=pool):
            _cut_window(node)


def _cut_window(node: fx.Node) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    named = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    shape = named["self"].meta["val"].shape
    rank = int(str(node.target).partition("_pool")[2][0])
    given = _of_rank(named["kernel_size"], rank)
    pads, steps = (_of_rank(named.get(n, by), rank) for n, by in (("padding", 0), ("dilation", 1)))
    room = [size + 2 * pad for size, pad in zip(shape[-rank:], pads, strict=True)]
    cut = [
        min(w, r) if isinstance(r, int) and step == 1 else w
        for w, r, step in zip(given, room, steps, strict=True)
    ]
    if cut != given:
        node.args = (node.args[0], cut, named.get("stride") or given, *node.args[3:])


def _of_rank(value: Any, rank: int) -> list[int]:
    """A number, or a list of one, counts for each axis."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * rank if len(values) == 1 else values
