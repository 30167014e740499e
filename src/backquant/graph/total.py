"""Python's operators as a small language that is total: a call ends soon, in little memory, or is an error.

A graph computes with numbers beside tensors, and a file writes graphs. What Python would do to a number
without an end is an ``InputError`` here, before it is done:

1. Integers have 64 bits, those of arguments and of results.
2. Lists, tuples, dicts, ranges and texts have at most 65,536 parts, those of their parts among them: in what
   an operator gets, and in what it returns.
3. Powers, shifts and repeats are bounded before they are computed, digits before they are rounded.
4. A text is a label: it is compared, joined and cut, never a format.
5. Sums, products and common multiples check each step.
6. Operators of ``torch.ops`` without an overload get a tensor first, where one of their overloads takes none.
7. Tensors go to torch's operators, with numbers and tensors; their first axis is iterated, as rule 2 says.
8. Operators that measure the range of a tensor take one without elements (an empty batch).

``total`` is asked by the executor of graphs (``call_table.py``), for every graph.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterable
from functools import lru_cache, reduce, wraps
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload, OpOverloadPacket

from backquant.errors import InputError

_MOST = 1 << 16
_LOW, _HIGH = -(1 << 63), (1 << 63) - 1
_DIGITS = 400  # beyond any float
_ATOMS = frozenset({float, bool, complex, type(None), torch.Tensor})
_TEXTS = (str, bytes)
_MEASURING = frozenset(
    f"quantized_decomposed::{name}" for name in ("choose_qparams", "choose_qparams_symmetric")
)
_SEQUENCES = (list, tuple, range, dict, set, frozenset, *_TEXTS)
Function = Callable[..., Any]


def total(function: Function) -> Function:
    """What a graph calls where a node names ``function``.

    >>> total(operator.mul)(3, 1 << 40) == 3 << 40, total(torch.relu) is torch.relu
    (True, True)
    >>> total(operator.mul)(1 << 40, 1 << 40)
    Traceback (most recent call last):
    backquant.errors.InputError: mul computes an integer of more than 64 bits
      where  operator.mul
    ...
    """
    if isinstance(function, OpOverloadPacket):
        return _packet(function)
    if isinstance(function, OpOverload) and function._schema.name in _MEASURING:
        return _or_nothing(function, _no_qparams)
    try:
        return _TOTAL.get(function, function)
    except TypeError:  # an object that is no key
        return function


def is_of_tensors(overload: OpOverload) -> bool:
    """Whether an operator takes or makes tensors, or makes nothing. TorchScript's operators of numbers, lists
    and texts end the process (``remainder.int`` by zero).

    >>> is_of_tensors(torch.ops.aten.remainder.Scalar), is_of_tensors(torch.ops.aten.remainder.int)
    (True, False)
    """
    schema = overload._schema
    types = [str(value.type) for value in (*schema.arguments, *schema.returns)]
    has_tensors = not schema.returns or any("Tensor" in kind for kind in types)
    return has_tensors and not schema.overload_name.startswith("prim_")


def _or_nothing(function: Function, instead: Function) -> Function:
    """``function``, which measures a tensor; ``instead`` where the tensor has no elements."""

    def called(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(value, *args, **kwargs) if value.numel() else instead(value, *args)

    return called


def _no_qparams(value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale and a zero point: any holds what is not there."""
    return value.new_ones(1, dtype=torch.float64), value.new_zeros(1, dtype=torch.int64)


def _no_integers(value: torch.Tensor, dtype: torch.dtype, *_: Any) -> torch.Tensor:
    if dtype.is_floating_point:
        return value.to(dtype)
    return torch.quantize_per_tensor(value, 1.0, 0, dtype)


@lru_cache(maxsize=1024)
def _packet(packet: OpOverloadPacket) -> Function:
    """Rule 6."""
    if all(is_of_tensors(getattr(packet, name)) for name in packet.overloads()):
        return packet

    def called(*args: Any, **kwargs: Any) -> Any:
        if not args or isinstance(args[0], (int, float, complex, *_SEQUENCES)):
            raise InputError(
                f"{packet} computes numbers of Python",
                where=str(packet),
                fix="its first argument is a tensor; functions of operator compute numbers",
            )
        return packet(*args, **kwargs)

    return called


def total_method(receiver: Any, name: str) -> Function:
    """The method of an object: of numbers, texts and sequences the operator that is called so.

    >>> total_method("%d", "__mod__")(1)
    Traceback (most recent call last):
    backquant.errors.InputError: mod formats a text
      where  operator.mod
    ...
    """
    if isinstance(receiver, (int, float, complex, *_SEQUENCES)) and name.startswith("__"):
        plain = name.strip("_")
        own = getattr(operator, _SPELLED.get(plain, plain), None) or getattr(builtins, plain, None)
        if own is not None:
            return lambda *args: total(own)(receiver, *args)
        reflected = getattr(operator, _SPELLED.get(plain[1:], plain[1:]), None)
        if plain.startswith("r") and reflected is not None:
            return lambda other: total(reflected)(other, receiver)
    method: Function = getattr(receiver, name)
    return method


_SPELLED = {"and": "and_", "or": "or_"}  # where the operator has another name than the method


def _refuse(function: Function, what: str) -> NoReturn:
    name = function.__name__
    raise InputError(
        f"{name} {what}",
        where=f"{function.__module__.lstrip('_')}.{name}",
        fix=f"numbers of a graph have 64 bits, sequences at most {_MOST:,} parts: use tensors for more",
    )


def parts(function: Function, value: Any) -> int:
    """How many values ``value`` is put together of; raises for more than rules 1 and 2 admit.

    >>> parts(len, [1, (2, "ab")])
    6
    """
    count, pending = -1, [value]
    while pending:
        one = pending.pop()
        kind = type(one)
        if kind is int:
            if not _LOW <= one <= _HIGH:
                _refuse(function, "computes an integer of more than 64 bits")
        elif kind not in _ATOMS and isinstance(one, _SEQUENCES):
            if count + _length(one) > _MOST:
                _refuse(function, f"has a sequence of more than {_MOST:,} parts")
            if isinstance(one, (range, *_TEXTS)):
                count += _length(one)
            else:
                pending += (*one.keys(), *one.values()) if isinstance(one, dict) else one
        count += 1
    return count


def _length(sequence: Any) -> int:
    if isinstance(sequence, range):  # whose ``len`` raises beyond 64 bits
        span = sequence.stop - sequence.start
        return max(0, -(-span // sequence.step))
    return len(sequence)


def _bounded(function: Function, check: Function | None = None) -> Function:
    """``function`` of arguments in the language, after ``check``, whose result is in it."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if type(value) not in _ATOMS:
                parts(function, value)
        for value in kwargs.values():
            parts(function, value)
        if check is not None:
            check(function, *args, **kwargs)
        result = function(*args, **kwargs)
        if type(result) not in _ATOMS:
            parts(function, result)
        return result

    return called


def _iterated(function: Function, *args: Any, **_: Any) -> None:
    """Rule 7, for what iterates over its arguments."""
    for value in args:
        if isinstance(value, torch.Tensor) and value.dim() and len(value) > _MOST:
            _refuse(function, f"has a sequence of more than {_MOST:,} parts")


def _alike(function: Function, left: Any, right: Any) -> None:
    """A sequence is joined with a sequence; a tensor is none."""
    if isinstance(left, _SEQUENCES) and isinstance(right, torch.Tensor):
        _refuse(function, "joins a sequence and a tensor")


def _repeated(function: Function, left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, _SEQUENCES):
            if isinstance(times, torch.Tensor):
                _refuse(function, "repeats a sequence by a tensor")
            if isinstance(times, int) and parts(function, sequence) * times > 2 * _MOST:
                _refuse(function, f"repeats a sequence {times:,} times")


def _powers(function: Function, base: Any, exponent: Any, modulus: Any = None) -> None:
    is_whole = isinstance(base, int) and isinstance(exponent, int) and modulus is None
    if is_whole and abs(base) > 1 and exponent > 64:
        _refuse(function, "computes an integer of more than 64 bits")


def _shifts(function: Function, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and right > 64:
        _refuse(function, "computes an integer of more than 64 bits")


def _no_format(function: Function, left: Any, right: Any) -> None:  # noqa: ARG001
    if isinstance(left, _TEXTS):
        _refuse(function, "formats a text")


def _digits(function: Function, number: Any, digits: Any = None) -> None:
    places = 0 if digits is None else operator.index(digits)
    if abs(places) > _DIGITS and not isinstance(number, torch.Tensor):
        _refuse(function, f"rounds to {places:,} digits")


def _range(*args: Any) -> range:
    """``range``, whose length is known before it is made."""
    made = range(*args)
    parts(range, [made.start, made.stop, made.step])
    parts(range, made)
    return made


def _all_of(function: Function, step: Function, neutral: int, verb: str) -> Function:
    """``sum`` or ``math.prod`` of numbers and tensors."""

    def called(values: Iterable[Any], start: Any = neutral) -> Any:
        _iterated(function, values)
        parts(function, values)
        for value in (start, *values):
            if isinstance(value, _SEQUENCES):
                _refuse(function, f"{verb} sequences")
        return reduce(total(step), values, start)

    return called


def _lcm(*integers: Any) -> Any:
    """``math.lcm``, two at a time."""
    return reduce(_bounded(math.lcm), integers, 1)


def _getitem(sequence: Any, place: Any) -> Any:
    """``operator.getitem``; a dict hashes its key, all parts of it."""
    if type(place) is not int and isinstance(sequence, dict):
        parts(operator.getitem, place)
    return sequence[place]


def _setitem(sequence: Any, place: Any, value: Any) -> None:
    """``operator.setitem``, which does not put a sequence into itself."""
    if isinstance(sequence, _SEQUENCES):
        _alike(operator.setitem, sequence, value)
        together = parts(operator.setitem, [sequence, place, value])
        if together > _MOST or (isinstance(value, _SEQUENCES) and _holds(value, sequence)):
            _refuse(operator.setitem, "puts a sequence into itself, or makes too long a one")
    sequence[place] = value


def _holds(value: Any, sequence: Any) -> bool:
    pending = [value]
    while pending:
        one = pending.pop()
        if one is sequence:
            return True
        if isinstance(one, (list, tuple)):
            pending += one
        elif isinstance(one, dict):
            pending += one.values()
    return False


_CHECKS: dict[str, Function] = {
    **dict.fromkeys(("add", "iadd", "concat"), _alike),
    **dict.fromkeys(("mul", "imul"), _repeated),
    **dict.fromkeys(("pow", "ipow"), _powers),
    **dict.fromkeys(("lshift", "ilshift"), _shifts),
    **dict.fromkeys(("mod", "imod"), _no_format),
}
_PLAIN = (
    "abs and_ contains eq floordiv ge gt iand ifloordiv imatmul index inv invert ior irshift isub itruediv "
    "ixor le lt matmul ne neg or_ pos rshift sub truediv xor"
)
_BUILTINS: dict[Function, Function | None] = {
    **dict.fromkeys((abs, bool, complex, divmod, float, int)),
    **dict.fromkeys((list, tuple, min, max), _iterated),
    pow: _powers,
    round: _digits,
}


def _table() -> dict[Function, Function]:
    table: dict[Function, Function] = {
        getattr(operator, name): _bounded(getattr(operator, name), _CHECKS.get(name))
        for name in (*_PLAIN.split(), *_CHECKS)
    }
    table |= {function: _bounded(function, check) for function, check in _BUILTINS.items()}
    functions = [f for name, f in vars(math).items() if callable(f) and not name.startswith("_")]
    table |= {function: _bounded(function) for function in functions}
    table |= {
        operator.getitem: _getitem,
        operator.setitem: _setitem,
        range: _range,
        sum: _all_of(sum, operator.add, 0, "adds"),
        math.prod: _all_of(math.prod, operator.mul, 1, "multiplies"),
        math.lcm: _lcm,
        torch.quantize_per_tensor_dynamic: _or_nothing(
            torch.quantize_per_tensor_dynamic, _no_integers
        ),
    }
    return table


_TOTAL = _table()
