"""Whether two recordings of a model, of a batch and of a part of it, compute the same of other samples.

They do if they call the same operators with the same numbers on corresponding tensors. Three things may
differ, since they change no value:

1. sizes that an operator is told (``view``, ``expand``): those of its result, in which the dimension that
   holds samples has as many as the part has;

2. how integers become a quantized tensor and back: small tensors are copied, memory of large ones is shown;

3. copies, and the strides of dimensions of size one.

A number that came from a shape, a count or a batch is another one in the other recording, or is the same in
both. So nothing is known of values, and nothing depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from backquant.operators.samples import Mixed
from backquant.runtime.replay.kinds import (
    AS_STRIDED,
    BLANK,
    COPIES,
    COPY,
    REPLAYED_AS,
    SETS,
)
from backquant.runtime.replay.record import Call, Layout, Recording, Ref

_aten = torch.ops.aten
#: The places of arguments that are sizes of the result.
_SIZES = MappingProxyType(
    {
        **dict.fromkeys(("view", "_unsafe_view", "reshape", "expand"), (1,)),
        **dict.fromkeys(("zeros", "ones", "full"), (0,)),
        "unflatten": (2,),
        "as_strided_": (1, 2),
    }
)


def check_alike(
    whole: Recording, part: Recording, samples: Mapping[str, int | None], parts: int
) -> None:
    """Raise ``Mixed`` unless ``part`` computes what ``whole`` does, of one of so many parts of the samples.

    ``samples``: the dimension of each tensor of ``whole`` that holds them. Cost: linear.

    >>> from backquant.runtime.replay.record import record
    >>> def check(function):
    ...     whole, part = (record(function, (torch.ones(rows, 3),), {}, list)[1] for rows in (4, 2))
    ...     check_alike(whole, part, dict.fromkeys(whole.layouts, 0), 2)
    >>> check(lambda x: torch.relu(x.view(x.size(0), 3, 1)) * 2)
    >>> check(lambda x: torch.relu(x) * len(x))
    Traceback (most recent call last):
    backquant.operators.samples.rules.Mixed: aten::mul is called with 4 for all samples, with 2 for a part
    """
    one, other = _Values(whole), _Values(part)
    for first, second in zip(one.steps, other.steps, strict=False):
        name = first.operator._schema.name
        if first.operator is not second.operator:
            raise Mixed(f"{name} is {second.operator._schema.name} for a part")
        if not _equal(first.arguments, second.arguments):
            raise Mixed(f"{name} is called with {_difference(first.arguments, second.arguments)}")
        for ours, its in zip(first.outputs, second.outputs, strict=True):
            if part.layouts[its].size != _expected(whole.layouts[ours].size, samples[ours], parts):
                raise Mixed(f"{name} gives another size for a part")
    if len(one.steps) != len(other.steps):
        raise Mixed("a part of the samples takes other operators")
    if not _equal(_results(whole, one), _results(part, other)):
        raise Mixed("a part of the samples gives another result")


class _Step(NamedTuple):
    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    outputs: list[str]


class _Value(NamedTuple):
    """Result ``place`` of step ``step``; of step -1 an input. ``shown``: the dtype and qparams as which its
    memory is shown, where it is not as it was made."""

    step: int
    place: int
    shown: tuple[torch.dtype, tuple[float, int] | None] | None = None


class _Constant(NamedTuple):
    identity: int


class _Values:
    """The steps of a recording that compute. ``values``: by the name of a tensor which value it has."""

    def __init__(self, recording: Recording) -> None:
        self.layouts = recording.layouts
        self.steps: list[_Step] = []
        self.values: dict[str, _Value | _Constant] = {
            name: _Value(-1, place) for place, name in enumerate(recording.inputs)
        }
        for name, tensor in recording.constants.items():
            self.values[name] = _Constant(id(tensor))
        self.flat: dict[str, str] = {}  # by the name of a flat view: what it shows
        self.memory: dict[str, str] = {}  # by the name of a view: whose memory it shows
        self.views: dict[str, list[str]] = {}  # of the memory of a tensor
        for call in recording.calls:
            self._visit(call)

    def _visit(self, call: Call) -> None:
        if call.operator in BLANK:
            return
        if call.operator is AS_STRIDED:
            self._strided(call.arguments[0].name, _names(call)[0])
        elif call.operator in SETS:
            self._set(call, _names(call)[0])
        elif call.operator is COPY:
            self._show(call.arguments[0].name, _names(call)[0], shares=False)
        elif call.operator in COPIES:
            source, name = call.arguments[0].name, _names(call)[0]
            self.values[name] = self.read(source)
            self._share(source, name)
        else:
            self._step(call)

    def _strided(self, source: str, name: str) -> None:
        if _same_places(self.layouts[source], self.layouts[name]):
            self.values[name] = self.read(source)
        self.flat[name] = source
        self._share(source, name)

    def _set(self, call: Call, name: str) -> None:
        source = self.flat.get(call.arguments[1].name)
        if (
            source is None
            or call.arguments[2]
            or self.layouts[source][:2] != self.layouts[name][:2]
        ):
            raise Mixed("memory is shown in another way than it was written")
        self._show(source, name, shares=True)

    def _show(self, source: str, name: str, *, shares: bool) -> None:
        value, layout = self.read(source), self.layouts[name]
        if isinstance(value, _Constant):
            raise Mixed("what the model holds is shown as of another kind")
        self.values[name] = value._replace(shown=(layout.dtype, layout.qparams))
        if shares:
            self._share(source, name)

    def _share(self, source: str, name: str) -> None:
        root = self.memory.get(source, source)
        self.memory[name] = root
        self.views.setdefault(root, [root]).append(name)

    def _step(self, call: Call) -> None:
        schema = REPLAYED_AS.get(call.operator, call.operator)._schema  # says what is a view
        arguments = tree_map(self._argument, call.arguments, is_leaf=_is_ref)
        dropped = _SIZES.get(schema.name.removeprefix("aten::"), ())
        arguments = tuple(None if i in dropped else a for i, a in enumerate(arguments))
        for argument, value in zip(schema.arguments, call.arguments, strict=True):
            if argument.alias_info is None or not isinstance(value, Ref):
                continue
            if argument.alias_info.is_write:
                self._write(value.name)
            for name in _names(call):
                self._share(value.name, name)
        for place, name in enumerate(_names(call)):
            self.values[name] = _Value(len(self.steps), place)
        self.steps.append(_Step(call.operator, arguments, _names(call)))

    def _write(self, name: str) -> None:
        """What else shows that memory has no known value from now on."""
        root = self.memory.get(name, name)
        for view in self.views.get(root, [root]):
            self.values.pop(view, None)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.ScriptObject):
            raise Mixed("packed weights are not known to be those of the whole")
        return self.read(leaf.name) if isinstance(leaf, Ref) else leaf

    def read(self, name: str) -> _Value | _Constant:
        """Raises ``Mixed`` for what was written in another way."""
        if name not in self.values:
            raise Mixed("memory is read in another way than it was written")
        return self.values[name]


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)


def _names(call: Call) -> list[str]:
    found: list[str] = []
    for output in call.outputs:
        found += [output] if isinstance(output, str) else output or ()
    return found


def _same_places(one: Layout, other: Layout) -> bool:
    if one.size != other.size:
        return False
    strides = zip(one.size, one.stride, other.stride, strict=True)
    return all(length <= 1 or first == second for length, first, second in strides)


def _expected(size: tuple[int, ...], dim: int | None, parts: int) -> tuple[int, ...]:
    return tuple(length // parts if i == dim else length for i, length in enumerate(size))


def _results(recording: Recording, values: _Values) -> list[Any]:
    leaves, structure = tree_flatten(recording.result)
    found = [values.read(leaf.name) if isinstance(leaf, Ref) else leaf for leaf in leaves]
    return [structure, *found]


def _leaves(value: Any) -> list[Any]:
    return tree_leaves(
        value, is_leaf=lambda each: isinstance(each, (_Value, _Constant)) or each is None
    )


def _equal(one: Any, other: Any) -> bool:
    """Of the same kinds, too: 0.0 is not -0.0, and 1 is not True."""
    first, second = _leaves(one), _leaves(other)
    return len(first) == len(second) and all(
        type(a) is type(b) and (a == b if not isinstance(a, float) else a.hex() == b.hex())
        for a, b in zip(first, second, strict=True)
    )


def _difference(one: Any, other: Any) -> str:
    for first, second in zip(_leaves(one), _leaves(other), strict=False):
        if not _equal((first,), (second,)):
            if isinstance(first, (_Value, _Constant)) or isinstance(second, (_Value, _Constant)):
                break
            return f"{first!r} for all samples, with {second!r} for a part"
    return "other tensors for a part"
