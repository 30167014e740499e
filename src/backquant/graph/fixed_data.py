"""Numbers and texts in the arguments of a model that an export makes part of its graph.

``torch.export`` takes tensors as inputs; a number beside them has the value of the example. A call with
another one would have the result for the example's, so it is refused.

1. In tuples, lists and dicts every number, text and ``None`` is fixed.
2. In objects (the caches of decoders) those are fixed that change what the model returns: it is called with
   others in their place. Of the rest, such as names and counters that nothing reads, any will do.
"""

from __future__ import annotations

import copy
import dis
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from backquant.errors import InputError
from backquant.graph.example import check_inputs
from backquant.graph.interception import frame_line, is_users
from backquant.graph.objects import attributes, is_object, tensors_of

_PLAIN = (bool, int, float, str, type(None))
Owner = tuple[type, str]  # a class, and the name of one of its attributes
Data = tuple[tuple[str, Any], ...]  # pairs of a path in an argument and the value there


class Leaf(NamedTuple):
    """``place``: where it stands in an argument. ``owner``: the attribute that holds it, of an object."""

    place: str
    value: Any
    owner: Owner | None


def leaves(
    value: Any, place: str = "", owner: Owner | None = None, above: frozenset[int] = frozenset()
) -> Iterator[Leaf]:
    """What ``value`` is made of: tensors, numbers, and all else that is taken apart no further. ``place``,
    ``owner`` and ``above``: where it stands itself.

    >>> import types
    >>> [leaf[:2] for leaf in leaves({"a": [1, "b"], "c": types.SimpleNamespace(d=2.0)})]
    [("['a'][0]", 1), ("['a'][1]", 'b'), ("['c'].d", 2.0)]
    """
    if id(value) in above:  # a cycle: an object that contains itself
        return
    above |= {id(value)}
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{place}[{key!r}]", owner, above)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from leaves(part, f"{place}[{index}]", owner, above)
    elif is_object(value) and type(value) in pytree.SUPPORTED_NODES:
        parts, _ = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        yield from leaves(list(parts), place, owner, above)
    elif is_object(value):
        for name, part in attributes(value).items():
            yield from leaves(part, f"{place}.{name}", (type(value), name), above)
    else:
        yield Leaf(place, value, owner)


def fixed_data(
    model: nn.Module | None, example_inputs: Any, output: Any, given: Mapping[str, Any]
) -> dict[str, Data]:
    """Of each argument the places that a call may not change, with their values.

    Args:
        model: what is exported; ``None`` for one that is exported already, of which objects are not tried.
        example_inputs: what it is called with.
        output: what it returned for them.
        given: the same arguments by name.

    >>> class Scaled(nn.Module):
    ...     def forward(self, x, options): return x * options.scale
    >>> import types
    >>> options = types.SimpleNamespace(scale=2.0, label="a", mask=torch.ones(1))
    >>> inputs, model = (torch.ones(1), options), Scaled()
    >>> fixed_data(model, inputs, model(*inputs), {"x": inputs[0], "options": options})
    {'options': (('.scale', 2.0),)}
    """
    held = {name: list(leaves(value)) for name, value in given.items() if tensors_of(value)}
    owners = {
        leaf.owner
        for found in held.values()
        for leaf in found
        if leaf.owner and isinstance(leaf.value, (int, float, str))
    }
    tried = owners if model is not None else set()
    read = {owner for owner in tried if model and _matters(model, example_inputs, output, owner)}
    found = {
        name: tuple(
            (leaf.place, leaf.value)
            for leaf in parts
            if isinstance(leaf.value, _PLAIN) and (leaf.owner is None or leaf.owner in read)
        )
        for name, parts in held.items()
    }
    return {name: data for name, data in found.items() if data}


def _matters(model: nn.Module, example_inputs: Any, output: Any, owner: Owner) -> bool:
    """Whether the model returns something else where ``owner`` holds another value."""
    try:
        found = check_inputs(model, _changed(example_inputs, owner, False, {}))
    except InputError:
        return True
    one, other = list(leaves(output)), list(leaves(found))
    return len(one) != len(other) or not all(map(_same, one, other))


def _same(one: Leaf, other: Leaf) -> bool:
    a, b = one.value, other.value
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    return one.place == other.place and (not isinstance(a, _PLAIN) or equal(a, b))


def equal(one: Any, other: Any) -> bool:
    """Whether two plain values are, NaN and NaN too.

    >>> equal(float("nan"), float("nan")), equal(1, 2)
    (True, False)
    """
    nan = (
        isinstance(one, float)
        and isinstance(other, float)
        and math.isnan(one)
        and math.isnan(other)
    )
    return isinstance(other, _PLAIN) and (one == other or nan)


def _changed(value: Any, owner: Owner, within: bool, made: dict[int, Any]) -> Any:
    """``value`` with other numbers and texts in the attribute ``owner`` of its objects."""
    if within and isinstance(value, (int, float, str)):
        if isinstance(value, bool):
            return not value
        return f"{value}_" if isinstance(value, str) else value + 1
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, dict):
        made[id(value)] = result = copy.copy(value)
        for key, part in value.items():
            result[key] = _changed(part, owner, within, made)
        return result
    if isinstance(value, (list, tuple)):
        parts = [_changed(part, owner, within, made) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not is_object(value) or type(value) in pytree.SUPPORTED_NODES:
        return value
    kind: Any = type(value)
    made[id(value)] = result = kind.__new__(kind)
    for name, part in attributes(value).items():
        inside = within or owner == (kind, name)
        object.__setattr__(result, name, _changed(part, owner, inside, made))
    return result


# What an ``assert`` statement of a model needs to be true, where the values that decide are not known.


# Between the instruction that asks for a truth and the next that means something.
_SKIPPED = frozenset({"CACHE", "NOP", "TO_BOOL", "EXTENDED_ARG", "NOT_TAKEN"})


def asserted(frame: FrameType) -> bool | None:
    """The truth with which the ``assert`` that ``frame`` is at passes; ``None``: it is at none.

    >>> class Asked:
    ...     def __bool__(self):
    ...         print(asserted(sys._getframe(1)))
    ...         return True
    >>> assert Asked()
    True
    >>> if Asked(): pass
    None
    """
    return _answers(frame.f_code).get(frame.f_lasti)


@lru_cache(maxsize=256)
def _answers(code: CodeType) -> dict[int, bool]:
    """By the offset of an instruction: the truth that leads past the error of an ``assert``."""
    found: dict[int, bool] = {}
    steps = list(dis.get_instructions(code))
    errors = {step.offset for step in steps if _raises(step)}
    for index, step in enumerate(steps):
        jumps_if = {"TRUE": True, "FALSE": False}.get(step.opname.rpartition("_IF_")[2])
        if jumps_if is None:
            continue
        after = next((one for one in steps[index + 1 :] if one.opname not in _SKIPPED), None)
        if after is not None and after.offset in errors:
            answer = jumps_if
        elif step.argval in errors:  # ``assert one and two``
            answer = not jumps_if
        else:
            continue
        found[step.offset] = answer
        before = index - 1
        while before >= 0 and steps[before].opname in _SKIPPED:
            found[steps[before].offset] = answer
            before -= 1
    return found


def _raises(step: dis.Instruction) -> bool:
    is_own = step.opname == "LOAD_ASSERTION_ERROR"
    return is_own or (step.opname == "LOAD_COMMON_CONSTANT" and "AssertionError" in step.argrepr)


class _Passing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not is_users(frame.f_code.co_filename):
                frame = frame.f_back  # other modes stand between
            answer = None if frame is None else asserted(frame)
            if answer is not None:
                self.lines[frame_line(frame)] = None
                return answer
        return func(*args, **(kwargs or {}))


@contextmanager
def passing_asserts() -> Iterator[dict[str, None]]:
    """Within the block ``assert`` statements about values of tensors pass; their lines are noted.

    >>> with passing_asserts() as lines:
    ...     if torch.zeros(1):
    ...         print("no assert")
    >>> lines
    {}
    """
    with _Passing() as mode:
        yield mode.lines


def unchecked_notes(lines: Iterable[str]) -> tuple[str, ...]:
    """What a report says of asserts (``file:line: source``) that passed.

    >>> unchecked_notes(["net.py:3: assert x.all()"])
    ('what an assert says of values is not checked: net.py:3: assert x.all()',)
    """
    return tuple(f"what an assert says of values is not checked: {line}" for line in lines)
