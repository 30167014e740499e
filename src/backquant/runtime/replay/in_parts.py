"""A batch that is computed in parts, each through the whole program: sample by sample, or a thread's share.

What an operator gives for one image is still in the cache when the next operator reads it; of a batch of
images it is not. And threads that compute a part each wait for each other once, not at the end of each
operator.

Only where the operators say that any inputs get the same bits as in the whole batch:

1. each gives a sample the same bits in any batch (``unmixed``); and

2. those of a part are those of the whole, with the same numbers (``alike``): none came from the number of
   samples.

That both hold is tried all the same, on the call that is recorded and on random inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from backquant.operators.samples import (
    Held,
    Mixed,
    check_numbers,
    dimension_of_samples,
    repeated,
)
from backquant.runtime.replay.program import Program
from backquant.runtime.replay.record import (
    AS_STRIDED,
    BLANK,
    COPIES,
    COPY,
    REPLAYED_AS,
    SETS,
    Call,
    Layout,
    NotReplayable,
    Recording,
    Ref,
    record,
)
from backquant.runtime.replay.shortened import shortened
from backquant.runtime.replay.threads import on_threads

# Whether two recordings of a model, of a batch and of a part of it, compute the same of other samples.
#
# They do if they call the same operators with the same numbers on corresponding tensors. Three things may
# differ, since they change no value:
#
# 1. sizes that an operator is told (``view``, ``expand``): those of its result, in which the dimension that
#    holds samples has as many as the part has;
#
# 2. how integers become a quantized tensor and back: small tensors are copied, memory of large ones is shown;
#
# 3. copies, and the strides of dimensions of size one.
#
# A number that came from a shape, a count or a batch is another one in the other recording, or is the same in
# both. So nothing is known of values, and nothing depends on them.


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
    backquant.operators.samples.Mixed: aten::mul is called with 4 for all samples, with 2 for a part
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


_DIM = 0  # of inputs, that holds samples
_MOST = 256  # samples that are computed one by one: more are rows of a table


class Called(NamedTuple):
    """A call of a model: ``tensors`` are its arguments', ``result`` what it gave. ``constants``: what the
    model holds, asked after a call."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    constants: Callable[[], Iterable[torch.Tensor]]
    result: Any


def in_parts(whole: Recording, program: Program, called: Called) -> list[InParts]:
    """What gives the result of ``whole`` in parts: single samples, and, where that is more, all of a thread's
    samples at once. The model is called with a part of its arguments for each. ``program``: of the whole.

    Raises ``Mixed`` where parts are not known to give the bits of the whole.
    """
    count = _count(called.tensors)
    leaves = tree_flatten((called.args, called.kwargs))[0]
    found = {id(value): value for value in leaves if isinstance(value, torch.Tensor)}
    if list(found) != [id(value) for value in called.tensors]:
        raise Mixed("tensors stand within objects")
    holding = {
        name: _DIM
        for name, value in zip(whole.inputs, called.tensors, strict=True)
        if _holds_samples(value, count)
    }
    apart = samples_apart(whole, holding, count)
    share, left = divmod(count, torch.get_num_threads())
    sizes = {1} if count <= _MOST else set()
    sizes |= set() if left or share == count else {share}
    if not sizes:
        raise Mixed(f"there are more than {_MOST} samples")
    made, problems = [], []
    for rows in sorted(sizes):
        try:
            parts = _part_of(whole, called, apart, rows)
            _check_bits(parts, program, called)
            made.append(parts)
        except Mixed as problem:
            problems.append(problem)
    if not made:
        raise problems[0]
    return made


def _part_of(whole: Recording, called: Called, apart: Apart, rows: int) -> InParts:
    count = _count(called.tensors)
    args, kwargs = tree_map(
        lambda value: _part(value, 0, rows, count), (called.args, called.kwargs)
    )
    run = called.model.forward  # which prints nothing where a graph refuses so many samples
    try:
        run(*args, **kwargs)  # kernels may pack weights for inputs of another size
        _, recording = record(run, args, kwargs, called.constants)
    except Exception as problem:
        raise Mixed(f"a part of the samples is refused: {problem}") from None
    if isinstance(recording, NotReplayable):
        raise Mixed(str(recording))
    check_alike(whole, recording, apart.samples, count // rows)
    return InParts(Program(shortened(recording)), apart.results, whole.result, (count, rows))


def _check_bits(parts: InParts, program: Program, called: Called) -> None:
    """A second net: nothing that gets here is expected to differ."""
    if not _same_bits(parts(called.tensors), called.result):
        raise Mixed("a part of the samples gives other bits")
    generator = torch.Generator().manual_seed(0)  # the caller's draws stay what they are
    others = [_random_like(value, generator) for value in called.tensors]
    if not _same_bits(parts(others), program(others)):
        raise Mixed("a part of random samples gives other bits")


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values in the range of those of ``tensor``, laid out as they are."""
    size = tuple(tensor.shape)
    if not tensor.numel() or tensor.is_complex():
        return tensor
    if tensor.is_floating_point():
        widest = float(tensor.abs().max())
        width = widest if 0 < widest < math.inf else 1.0
        values = torch.randn(size, generator=generator) * (width / 3)
    else:
        low, high = int(tensor.min()), int(tensor.max())
        values = torch.randint(
            low, min(high + 1, 2**63 - 1) if high > low else low + 1, size, generator=generator
        )
    made = torch.empty_strided(size, tensor.stride(), dtype=tensor.dtype)
    return made.copy_(values)


def _same_bits(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b) for a, b in pairs)


def _count(tensors: Sequence[torch.Tensor]) -> int:
    counts = [value.size(_DIM) for value in tensors if value.dim()]
    if not counts or counts[0] < 2:
        raise Mixed("there is one sample")
    return counts[0]


def _holds_samples(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(_DIM) == count


def _part(value: Any, place: int, rows: int, count: int) -> Any:
    return value.narrow(_DIM, place * rows, rows) if _holds_samples(value, count) else value


class InParts:
    """``program``: of a part of the samples; ``results``: the tensors in ``structure``, the result of all.
    ``sizes``: the number of samples in all, and of a part."""

    def __init__(
        self, program: Program, results: Sequence[Result], structure: Any, sizes: tuple[int, int]
    ) -> None:
        self.program, self.results = program, results
        self.count, self.rows = sizes
        self._leaves, self._structure = tree_flatten(structure)
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Ref)]

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """The result for the flattened tensor arguments."""
        made = list(self._leaves)
        for place, each in zip(self._places, self.results, strict=True):
            if each.samples is not None:
                made[place] = torch.empty_strided(each.size, each.stride, dtype=each.dtype)

        def compute(part: int) -> None:
            given = [_part(value, part, self.rows, self.count) for value in tensors]
            found = tree_flatten(self.program(given))[0]
            for place, each in zip(self._places, self.results, strict=True):
                value = found[place]
                if each.samples is not None:
                    rows = value.size(each.samples)
                    made[place].narrow(each.samples, part * rows, rows).copy_(value)
                elif part == 0:
                    made[place] = value

        on_threads(compute, range(self.count // self.rows))
        return tree_unflatten(made, self._structure)


# Whether the operators of a recording compute each sample of a batch by itself, to the last bit.
#
# So that the bits of sample s of the result follow from sample s of the inputs:
#
# 1. each operator is known to compute block s of its result from blocks s of its arguments, in the same
#   way in any batch (``backquant.operators.samples``), or shows memory as it was written; and
#
# 2. nothing is written into constants or inputs.
#
# What a model does with the number of samples as a number, ``alike`` sees.


class Result(NamedTuple):
    """A tensor of a result: how it lies in memory, and the dimension that holds samples (``None``: the same
    for all)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    samples: int | None


class Apart(NamedTuple):
    """``results``: the tensors of the result, in their order. ``samples``: the dimension of each tensor that
    holds samples."""

    results: list[Result]
    samples: Mapping[str, int | None]


def samples_apart(recording: Recording, samples: Mapping[str, int], count: int) -> Apart:
    """Raises ``Mixed`` if samples are not apart.

    ``samples``: the dimension that holds the ``count`` samples, of those inputs that have one, by name. Cost:
    linear.

    >>> from backquant.runtime.replay.record import record
    >>> def apart(function):
    ...     _, found = record(function, (torch.ones(4, 3),), {}, list)
    ...     return samples_apart(found, {found.inputs[0]: 0}, 4).results
    >>> apart(lambda x: torch.relu(x) * 2)
    [Result(size=(4, 3), stride=(3, 1), dtype=torch.float32, samples=0)]
    >>> apart(lambda x: torch.relu(x).flip(0))
    Traceback (most recent call last):
    backquant.operators.samples.Mixed: aten::flip over samples
    >>> apart(lambda x: x.relu_() + 1)
    Traceback (most recent call last):
    backquant.operators.samples.Mixed: aten::relu_ writes into what the model is given, or holds
    """
    found = _Samples(recording, samples, count)
    for call in recording.calls:
        found.visit(call)
    return Apart(found.results(), found.samples)


class _Samples:
    def __init__(self, recording: Recording, samples: Mapping[str, int], count: int) -> None:
        self.recording, self.count = recording, count
        self.samples: dict[str, int | None] = dict.fromkeys(recording.constants)
        self.samples |= {name: samples.get(name) for name in recording.inputs}
        self.given = set(self.samples)  # what may be the memory of a constant or an input
        self.shown: dict[str, str] = {}  # by the name of a flat view: what it shows

    def visit(self, call: Call) -> None:
        outputs, read = _names(call), _read_names(call.arguments)
        if torch.Tag.nondeterministic_seeded in call.operator.tags:
            raise Mixed(f"{call.operator._schema.name} draws random numbers")
        self._check_writes(call, outputs, read)
        if call.operator is AS_STRIDED:  # no name of ``samples``: nothing but ``set_`` may read it
            self.shown[outputs[0]] = call.arguments[0].name
        else:
            place = self._place(call, outputs, read)
            self.samples.update(dict.fromkeys(outputs, place))

    def _check_writes(self, call: Call, outputs: list[str], read: set[str]) -> None:
        schema = call.operator._schema
        for argument, value in zip(schema.arguments, call.arguments, strict=True):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and _read_names(value) & self.given:
                raise Mixed(f"{schema.name} writes into what the model is given, or holds")
        views = any(returned.alias_info is not None for returned in schema.returns)
        if views and read & self.given:
            self.given.update(outputs)

    def _place(self, call: Call, outputs: list[str], read: set[str]) -> int | None:
        if call.operator in SETS:
            return self._shown(call, outputs[0])
        self._check_numbers(call, read, outputs)
        if not read <= self.samples.keys():
            raise Mixed(
                f"{call.operator._schema.name} reads memory in another way than it was written"
            )
        arguments = [self._value(value) for value in call.arguments]
        size = self.recording.layouts[outputs[0]].size if outputs else ()
        if all(self.samples[name] is None for name in read):
            return repeated(call.operator, arguments, size, self.count)
        return dimension_of_samples(call.operator, arguments, size, self.count)

    def _check_numbers(self, call: Call, read: set[str], outputs: list[str]) -> None:
        layouts = self.recording.layouts
        dtypes = ([layouts[name].dtype for name in names] for names in (read, outputs))
        check_numbers(call.operator, *dtypes)

    def _value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            constant = self.recording.constants.get(value.name)
            size = self.recording.layouts[value.name].size if constant is None else constant.shape
            return Held(tuple(size), self.samples[value.name])
        return tuple(self._value(item) for item in value) if isinstance(value, tuple) else value

    def _shown(self, call: Call, output: str) -> int | None:
        """A tensor of the same size and strides as that whose memory it shows."""
        source, layouts = self.shown.get(call.arguments[1].name, ""), self.recording.layouts
        if not source or call.arguments[2] or layouts[source][:2] != layouts[output][:2]:
            raise Mixed("memory is shown in another way than it was written")
        return self.samples[source]

    def results(self) -> list[Result]:
        found = []
        for leaf in tree_flatten(self.recording.result)[0]:
            if isinstance(leaf, Ref):
                size, stride, qparams, dtype = self.recording.layouts[leaf.name]
                if qparams is not None or 0 in stride:
                    raise Mixed("a result is a quantized tensor, or repeats its memory")
                found.append(Result(size, stride, dtype, self.samples[leaf.name]))
        return found


def _read_names(value: Any) -> set[str]:
    return {leaf.name for leaf in tree_flatten(value)[0] if isinstance(leaf, Ref)}
