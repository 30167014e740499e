"""Calls of operators that are safe for some arguments only; see ``backquant.artifact.operators``.

A node of a graph that comes from a file is checked when it is read:

1. No call writes its result into an argument (``out=``), calls back (``key=``), or brings a generator.
2. The windows of convolutions and pooling are literals between 0 and 65,536: larger ones wrap around in
   the operators' arithmetic.
3. ``repeat_interleave`` repeats by a literal, or a number made of sizes: with a tensor of repeats the
   operator writes where they add up to. ``tril_indices`` and ``triu_indices`` take literals below 65,536.
4. ``upsample_*`` of ``aten`` take scales that are literals between 1/65,536 and 65,536, ``interpolate``
   factors that make no more positions of one than a layer does (``backquant.artifact.growth``).
5. Integers are divided with truncation by literals above 0 (the smallest by -1 is a trap of the processor).
6. Dtypes, layouts and memory formats are those of torch: an operator takes any integer for one, and reading
   the name of one that does not exist ends the process.
7. Sizes that are written out ask for at most 67 million positions (``backquant.artifact.sizes``).
8. Arguments of our own kernels: ``backquant.artifact.kernels`` and ``kernel_tensors``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import SymInt
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from backquant.artifact import kernels
from backquant.artifact.growth import RESIZES, check_call_growth
from backquant.artifact.sizes import check_numbers, check_sizes
from backquant.errors import ArtifactError
from backquant.operators import overload

_NEVER = frozenset({"out", "key", "generator"})
_LARGEST = 1 << 16
_ENUMERATED = ("ScalarType", "Layout", "MemoryFormat")
_CONVOLUTION = re.compile(r"conv\d|conv_t|conv_tbc|convolution$")
_WINDOWED = re.compile(r"pool\d?d?|unpool|^unfold$|^fold$|im2col|col2im")
_UPSAMPLE = re.compile(r"^_?upsample_\w+\d")
# How many arguments of a windowed operator are tensors, or sizes that the operator checks.
_SIZED = {"fold": 2, "col2im": 2, "unfold": 1, "im2col": 1}


def check_call(path: str, target: Callable[..., Any], args: Any, kwargs: Any, where: str) -> None:
    """A ``call_function`` of what ``path`` names. Raises ``ArtifactError`` for arguments that are not safe.

    >>> import torch
    >>> check_call("torch.repeat_interleave", torch.repeat_interleave, (None, 3), {}, "node r")
    >>> check_call("torch.add", torch.add, (1, 2), {"out": None}, "node add")
    >>> check_call("torch.add", torch.add, (1, 2), {"out": 3}, "node add")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: add may not be called with out=
      where  node add
    """
    parts = path.split(".")
    name = parts[3] if path.startswith("torch.ops.") and len(parts) > 3 else parts[-1]
    if path in kernels.FUNCTIONS:
        kernels.check_arguments(target, args, kwargs, where)
        return
    if isinstance(target, OpOverload | OpOverloadPacket):
        _check_enumerated(name, target, args, kwargs, where)
    if parts[0] in ("builtins", "operator"):
        check_numbers(name, args, where)
    if parts[0] == "builtins" and name in ("min", "max"):
        _refuse_keywords(name, kwargs, where)
    if parts[0] == "torch":
        is_view = path.startswith("torch.ops.aten.unfold.")  # that of tensors, not of images
        _check(name, args, kwargs, where, is_method=is_view)


def _check_enumerated(name: str, target: Any, args: Any, kwargs: Any, where: str) -> None:
    """Rule 6."""
    for place in _enumerated(target):
        given = kwargs.get(place) if isinstance(place, str) else dict(enumerate(args)).get(place)
        if isinstance(given, int | float | Node | SymInt):
            raise ArtifactError(
                f"{name} may not be called with {given} where it takes a dtype, a layout or a memory format",
                where=where,
                fix='{"dtype": "int8"}, and so on, as backquant.save writes them',
            )


@lru_cache(maxsize=1024)
def _enumerated(target: OpOverload | OpOverloadPacket) -> frozenset[int | str]:
    """The positions and names of arguments that torch numbers."""
    return frozenset(_places(target))


def _places(target: OpOverload | OpOverloadPacket) -> Iterator[int | str]:
    found: list[Any] = [target]
    if isinstance(target, OpOverloadPacket):
        found = [getattr(target, name) for name in target.overloads()]
    for schema in (each._schema for each in found):
        for position, argument in enumerate(schema.arguments):
            if any(kind in str(argument.real_type) for kind in _ENUMERATED):
                yield argument.name
                if not argument.kwarg_only:
                    yield position


def check_method_call(name: str, args: Any, kwargs: Any, where: str) -> None:
    """``check_call`` for a ``call_method``; the first argument is the object of the method."""
    _check(name, args, kwargs, where, is_method=True)


def _refuse_keywords(name: str, kwargs: Any, where: str) -> None:
    refused = sorted(key for key in _NEVER & set(kwargs) if kwargs[key] is not None)
    if refused:
        raise ArtifactError(f"{name} may not be called with {refused[0]}=", where=where)


def _check(name: str, args: Any, kwargs: Any, where: str, *, is_method: bool) -> None:
    _refuse_keywords(name, kwargs, where)
    check_sizes(name, args, kwargs, where)
    wrong = ""
    if _CONVOLUTION.search(name):
        wrong = _windows(args[3:], kwargs, {"input", "weight", "bias"})
        if not wrong:
            check_call_growth(name, args, kwargs, where)
    elif _WINDOWED.search(name) and not (name == "unfold" and is_method):
        known = _SIZED.get(name, 2 if "unpool" in name or "adaptive" in name else 1)
        wrong = _windows(args[known:], kwargs, {"input", "indices", "output_size", "self"})
    elif name == "repeat_interleave":
        repeats = [*args[1:2], kwargs.get("repeats", 0)]
        wrong = _literals([r for r in repeats if not is_size(r)], 0, "repeats")
        wrong = wrong or ("" if len(args) > 1 or "repeats" in kwargs else "a tensor of repeats")
    elif name in ("tril_indices", "triu_indices"):
        wrong = _literals([*args, *(kwargs.get(key, 0) for key in ("row", "col"))], 0, "sizes")
    elif _UPSAMPLE.search(name):
        wrong = _scales(args[1:], kwargs)
    elif name in RESIZES:
        check_call_growth(name, args, kwargs, where)
    elif name in ("div", "divide", "div_", "divide_"):
        wrong = _division(args, kwargs)
    if wrong:
        raise ArtifactError(
            f"{name} may not be called with {wrong[:120]}",
            where=where,
            fix="numbers that are written in the model, and of the size that layers have",
        )


def _windows(args: Any, kwargs: Any, tensors: set[str]) -> str:
    named = {key: value for key, value in kwargs.items() if key not in tensors}
    return _literals([*args, *named.values()], 0, "a window")


def _literals(values: Any, low: int, what: str) -> str:
    for value in values:
        if isinstance(value, (list, tuple)):
            if wrong := _literals(value, low, what):
                return wrong
        elif isinstance(value, Node):
            return f"{what} that is computed ({value})"
        elif type(value) is int and not low <= value <= _LARGEST:
            return f"{value}"
    return ""


def _scales(args: Any, kwargs: Any) -> str:
    scales = [kwargs[key] for key in kwargs if "scale" in key]
    for value in (*args, *scales):
        found = value if isinstance(value, (list, tuple)) else [value]
        wrong = [v for v in found if type(v) is float and not 1 / _LARGEST <= v <= _LARGEST]
        if wrong:
            return f"the scale {wrong[0]}"
    computed = [v for v in (*args[2:], *scales) if isinstance(v, Node)]
    return "a scale that is computed" if computed else ""


def _division(args: Any, kwargs: Any) -> str:
    mode = kwargs.get("rounding_mode", args[2] if len(args) > 2 else None)
    if mode in (None, "floor"):
        return ""
    other = kwargs.get("other", args[1] if len(args) > 1 else None)
    return "" if type(other) in (int, float) and other > 0 else f"truncation and {other!r}"


# Numbers that a graph makes of sizes of tensors, and of nothing else: no tensor is among them.

_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
_MOST = 64  # nodes that are looked at for one number


def is_size(value: Any) -> bool:
    """Whether a value of a graph is a node for an integer that is made of sizes.

    >>> from torch.fx import symbolic_trace
    >>> graph = symbolic_trace(lambda x, y: x.repeat(x.shape[0] // y.size(0), y.shape[1] * y)).graph
    >>> [repeat] = graph.find_nodes(op="call_method", target="repeat")
    >>> [is_size(arg) for arg in repeat.args]
    [False, True, False]
    """
    if not isinstance(value, Node):
        return False
    seen, pending = {value}, [value]
    while pending and len(seen) <= _MOST:
        node = pending.pop()
        if _reads_size(node):
            continue
        numbers = all(type(arg) is int or isinstance(arg, Node) for arg in node.args)
        if node.op != "call_function" or node.target not in _ARITHMETIC or not numbers:
            return False
        pending += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return not pending


def _reads_size(node: Node) -> bool:
    """One size of a tensor."""
    if node.kwargs or len(node.args) != 2:
        return False
    source, place = node.args
    if not isinstance(source, Node) or type(place) is not int:
        return False
    if node.op == "call_method":
        return node.target == "size"
    if node.target is operator.getitem:
        is_shape = source.target is getattr and source.args[1:] == ("shape",)
        return is_shape or (source.target == "size" and len(source.args) == 1)
    return node.op == "call_function" and node.target is overload("sym_size")
