"""A recording as it is replayed: without what a call need not do again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from backquant.native.library import is_here
from backquant.operators import overload
from backquant.runtime.replay.record import (
    AS_STRIDED,
    CLONE,
    COPY,
    DEQUANTIZE,
    REPLAYED_AS,
    SETS,
    WITHOUT_EFFECT,
    Call,
    Layout,
    Recording,
    Ref,
)

# Quantized tensors that a recording passes on.
#
# Between kernels stand plain integers; those that run on quantized tensors make one from their input and
# show their result as integers. A recording of two such kernels in a row makes a quantized tensor of what one
# shows already: here the second reads the first's result as it is, and views that nothing reads go.
#
# Why that is equal for any input: the two quantized tensors have the same integers, since both are a copy or
# a view of the same memory; the same scale and zero point; and the same sizes and strides, so that a kernel
# takes the same way through them. And nothing writes into that memory, so that a copy is what was copied.


def pass_on(recording: Recording) -> Recording:
    """``recording`` without the views between kernels on quantized tensors. Cost: linear."""
    found = _Pass(recording)
    for call in recording.calls:
        found.visit(call)
    return found.finish()


class _Pass:
    def __init__(self, recording: Recording) -> None:
        self.old = recording
        self.layouts = recording.layouts
        self.calls: list[Call] = []
        self.made_by: dict[str, Call] = {}
        self.renamed: dict[str, str] = {}
        # from the name of a plain integer tensor to that of the quantized tensor with the same memory
        self.quantized: dict[str, str] = {}
        self.written = written(recording)

    def visit(self, call: Call) -> None:
        call = replace(call, arguments=tuple(self._renamed(value) for value in call.arguments))
        output = call.outputs[0] if len(call.outputs) == 1 else None
        if isinstance(output, str):
            known = self._known(call, output)
            if known is not None:
                self.renamed[output] = known
                return
            self._note_view(call, output)
        self.calls.append(call)
        for output in call.outputs:
            for name in _names(output):
                self.made_by[name] = call

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(self.renamed.get(value.name, value.name))
        if isinstance(value, tuple):
            return tuple(self._renamed(item) for item in value)
        return value

    def _viewed(self, call: Call) -> str | None:
        """What ``set_`` of a flat view shows as a whole: the tensor below."""
        if call.operator not in SETS or call.arguments[2] != 0:
            return None
        flat = self.made_by.get(call.arguments[1].name)
        if flat is None or flat.operator is not AS_STRIDED:
            return None
        source: str = flat.arguments[0].name
        layout = self.layouts[source]
        whole = (tuple(call.arguments[3]), tuple(call.arguments[4])) == layout[:2]
        return source if whole else None

    def _note_view(self, call: Call, output: str) -> None:
        source = self._viewed(call)
        if source is None or self.layouts[source].qparams is None:
            return
        if source not in self.written:
            self.quantized[output] = source

    def _known(self, call: Call, output: str) -> str | None:
        """The quantized tensor that is there already, of what the call would make one."""
        source = call.arguments[0].name if call.operator is COPY else self._viewed(call)
        known = self.quantized.get(source) if source is not None else None
        if known is None or self.layouts[output].qparams is None:
            return None
        return known if self.layouts[known] == self.layouts[output] else None

    def finish(self) -> Recording:
        result = _map_refs(self.old.result, self._renamed)
        needed = {ref.name for ref in _refs(result)}
        kept: list[Call] = []
        for call in reversed(self.calls):
            names = {name for output in call.outputs for name in _names(output)}
            if call.operator in WITHOUT_EFFECT and not names & needed:
                continue
            kept.append(call)
            needed |= {ref.name for ref in _refs(call.arguments)}
        return replace(
            self.old,
            calls=kept[::-1],
            result=result,
        )


def written(recording: Recording) -> set[str]:
    """The tensors of ``recording`` whose memory an operator writes into, as its schema says.

    ``set_`` shows memory, and writes nothing. Cost: linear.

    >>> import torch
    >>> from backquant.runtime.replay.record import record
    >>> _, recording = record(lambda x: (x + 1).view(-1).relu_() * 2, (torch.ones(1, 2),), {}, list)
    >>> sorted(written(recording))
    ['%1', '%2', '%3']
    """
    memory: dict[str, str] = {}
    found: set[str] = set()
    for call in recording.calls:
        schema = REPLAYED_AS.get(call.operator, call.operator)._schema
        shown = [r.name for r in _refs(call.arguments[1:2])] if call.operator in SETS else []
        for argument, value in zip(schema.arguments, call.arguments, strict=True):
            if argument.alias_info is None or call.operator in SETS:
                continue
            shown += [ref.name for ref in _refs(value)]
            if argument.alias_info.is_write:
                found.update(memory.get(ref.name, ref.name) for ref in _refs(value))
        for name in (n for output in call.outputs for n in _names(output)):
            if shown:
                memory[name] = memory.get(shown[0], shown[0])
    return {name for name in recording.layouts if memory.get(name, name) in found}


def _names(output: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if isinstance(output, tuple):
        return output
    return () if output is None else (output,)


def _refs(value: Any) -> list[Ref]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Ref)]


def _map_refs(value: Any, change: Callable[[Any], Any]) -> Any:
    leaves, structure = tree_flatten(value)
    return tree_unflatten([change(leaf) for leaf in leaves], structure)


def shortened(recording: Recording) -> Recording:
    """``recording`` with fewer calls, which gives the same. Cost: linear."""
    steps = (pass_on, quantize_products, quantize_planes, look_up_bytes, shuffle_parts, join_images)
    for step in steps:
        recording = step(recording)
    return recording


# Consecutive recorded calls that are fused into one.


class Rewriting:
    """A recording whose calls are replaced or dropped, by their places; a place that holds ``None`` is gone.

    >>> taken = Rewriting(Recording(("%0",), result=(Ref("%0"), Ref("%0"))))
    >>> taken.read["%0"], taken.made_for(Ref("%0")), taken.finish().calls
    (2, None, [])
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.calls: list[Call | None] = list(recording.calls)
        self.read = _read_counts(recording)
        self._made = {call.outputs[0]: place for place, call in enumerate(recording.calls)}
        self._constants: dict[Any, tuple[str, torch.Tensor]] = {}

    def made_for(self, value: Any) -> int | None:
        """The place of the call that made ``value``, a tensor that is read once, or a tuple of them, which is
        one list among its results; ``None`` where no call did, or one is read more often."""
        several = isinstance(value, tuple)
        parts = value if several else (value,)
        if not all(isinstance(part, Ref) and self.read[part.name] == 1 for part in parts):
            return None
        names = tuple(part.name for part in parts)
        return self._made.get(names if several else names[0])

    def fuse(self, first: int, call: Call, operator: Any, arguments: Any, *others: int) -> None:
        """Let ``operator`` give the results of ``call`` where the call at ``first`` was, in place of that and
        of those at ``others``: what it reads may be changed in place behind it."""
        self.calls[first] = replace(call, operator=operator, arguments=arguments)
        for place in others:
            self.calls[place] = None

    def constant(self, make: Callable[..., torch.Tensor], *of: Any) -> Ref:
        """``make(*of)``, one for all calls that need it."""
        if (make, of) not in self._constants:
            name = f"%made{len(self._constants)}"
            self._constants[make, of] = name, make(*of)
        return Ref(self._constants[make, of][0])

    def finish(self) -> Recording:
        """The recording as it is now."""
        calls = [call for call in self.calls if call is not None]
        made = dict(self._constants.values())
        layouts = {
            name: Layout(tuple(value.shape), value.stride(), None, value.dtype)
            for name, value in made.items()
        }
        constants = self.recording.constants | made
        layouts = self.recording.layouts | layouts
        return replace(self.recording, calls=calls, constants=constants, layouts=layouts)


def _rule(rule: Callable[[Rewriting, int, Call], None]) -> Callable[[Recording], Recording]:
    """The step that asks ``rule`` about each call, with its place, where the library of kernels is here.
    Cost: linear."""

    @wraps(rule)
    def step(recording: Recording) -> Recording:
        if not is_here():
            return recording
        made = Rewriting(recording)
        for place, call in enumerate(recording.calls):
            rule(made, place, call)
        return made.finish()

    return step


# Images of floats, plane by plane, that a recording quantizes and then lays out with channels last.
#
# The library of kernels has an operator for both, which writes the bytes once. Its integers are those of the
# two operators.


@_rule
def quantize_planes(made: Rewriting, place: int, call: Call) -> None:
    """One call for each such pair."""
    run, recording = torch.ops.backquant_kernels, made.recording
    if call.operator is not CLONE or call.arguments[1:] != (torch.channels_last,):
        return
    source = made.made_for(call.arguments[0])
    first = None if source is None else recording.calls[source]
    if source is None or first is None or first.operator is not run.quantized.default:
        return
    if _is_planes(recording, first):
        made.fuse(source, call, run.quantized_planes.default, first.arguments, place)


def _is_planes(recording: Recording, quantized: Call) -> bool:
    layout = recording.layouts[quantized.arguments[0].name]
    return len(layout.size) == 4 and is_dense(layout, layout.size, (0, 1, 2, 3))


# Two images whose channels a recording joins, and then takes in turn.
#
# The library of kernels reads both where they lie: nothing is joined before.


@_rule
def shuffle_parts(made: Rewriting, place: int, call: Call) -> None:
    """No such joins."""
    recording = made.recording
    if call.operator is not torch.ops.backquant_kernels.shuffled.default:
        return
    split = made.made_for(call.arguments)
    if split is None or recording.calls[split].arguments[2] != 1:
        return
    join = made.made_for(recording.calls[split].arguments[0])
    parts = None if join is None else _parts(recording, recording.calls[join])
    if join is not None and parts is not None:
        made.fuse(join, call, call.operator, parts, split, place)


def _parts(recording: Recording, join: Call) -> tuple[Any, ...] | None:
    """The two images of one size that ``join`` puts behind each other by channels."""
    if join.operator is not overload("cat") or join.arguments[1:] != (1,):
        return None
    parts = tuple(join.arguments[0])
    if len(parts) != 2 or not all(isinstance(part, Ref) for part in parts):
        return None
    one, other = (recording.layouts[part.name] for part in parts)
    fits = one.size == other.size and channels_apart(one) and channels_apart(other)
    return parts if fits else None


# Products of floats that a recording quantizes at once.
#
# An image times one number a channel, as a gate of a squeeze-and-excitation block is, and of which only
# integers are read: the library of kernels has an operator for both, which writes no floats. Its integers are
# those of the two operators.


@_rule
def quantize_products(made: Rewriting, place: int, call: Call) -> None:
    """One call for each such product."""
    run, recording = torch.ops.backquant_kernels, made.recording
    if call.operator is not run.quantized.default:
        return
    product = made.made_for(call.arguments[0])
    factors = None if product is None else _factors(recording, recording.calls[product])
    if product is not None and factors is not None:
        arguments = (*factors, *call.arguments[1:])
        made.fuse(product, call, run.quantized_product.default, arguments, place)


def _factors(recording: Recording, call: Call) -> tuple[Ref, Ref] | None:
    """An image and one number for each of its channels, which ``call`` multiplies."""
    if call.operator is not overload("mul"):
        return None
    one, other = call.arguments
    if not isinstance(one, Ref) or not isinstance(other, Ref):
        return None
    layouts = recording.layouts
    for image, gate in ((one, other), (other, one)):
        if _is_gate(layouts[image.name], layouts[gate.name]):
            return image, gate
    return None


def _is_gate(image: Layout, gate: Layout) -> bool:
    if image.dtype is not torch.float32 or gate.dtype is not torch.float32 or len(image.size) != 4:
        return False
    n, c, h, w = image.size
    is_last = is_dense(image, (n, h, w, c), (0, 2, 3, 1)) and h * w > 1
    return is_last and gate.size == (n, c, 1, 1) and is_dense(gate, gate.size, (0, 1, 2, 3))


# Images of bytes whose channels a recording puts behind each other.
#
# The library of kernels writes them at once, channels last; what is only scaled by channel behind it is
# scaled while it is written. Its integers are those of the operators.


@_rule
def join_images(made: Rewriting, place: int, call: Call) -> None:
    """One call for each such join."""
    run, recording = torch.ops.backquant_kernels, made.recording
    if _is_join(recording, call):
        made.fuse(place, call, run.joined.default, call.arguments[:1])
    elif call.operator is run.rescaled.default and _is_constant(recording, call.arguments[1]):
        source = made.made_for(call.arguments[0])
        join = None if source is None else made.calls[source]
        if source is not None and join is not None and join.operator is run.joined.default:
            arguments = (*join.arguments, *call.arguments[1:])
            made.fuse(source, call, run.joined_rescaled.default, arguments, place)


def _is_constant(recording: Recording, value: Any) -> bool:
    """Whether ``value`` is there before the first call."""
    return isinstance(value, Ref) and value.name in recording.constants


def _is_join(recording: Recording, call: Call) -> bool:
    """Whether ``call`` gives an image without holes of images that may be some channels of others."""
    if call.operator is not overload("cat") or call.arguments[1:] != (1,):
        return False
    layouts, name = recording.layouts, call.outputs[0]
    joined = layouts[name] if isinstance(name, str) else None
    if joined is None or not channels_apart(joined):
        return False
    n, c, h, w = joined.size
    parts = call.arguments[0]
    return is_dense(joined, (n, h, w, c), (0, 2, 3, 1)) and all(
        isinstance(part, Ref) and channels_apart(layouts[part.name]) for part in parts
    )


# Bytes that a recording takes to floats, which become other bytes at once.
#
# A function of one byte: the library of kernels has a table for it, which the operators themselves fill. It
# reads channels of an image where they lie, and writes the bytes once.


@_rule
def look_up_bytes(made: Rewriting, place: int, call: Call) -> None:
    """One call for each such chain."""
    recording = made.recording
    if call.operator is not torch.ops.backquant_kernels.quantized.default:
        return
    floats = _made_by(DEQUANTIZE, made, call)
    copied = None if floats is None else _made_by(COPY, made, recording.calls[floats])
    if floats is None or copied is None:
        return
    copy = recording.calls[copied]
    if channels_apart(recording.layouts[copy.arguments[0].name]):
        table = made.constant(_table, *copy.arguments[1:], *call.arguments[1:])
        run = torch.ops.backquant_kernels.looked_up.default
        made.fuse(copied, call, run, (copy.arguments[0], table), floats, place)


def _made_by(operator: Any, made: Rewriting, call: Call) -> int | None:
    """The place of the ``operator`` that made the first argument of ``call``, for it alone."""
    place = made.made_for(call.arguments[0])
    is_one = place is not None and made.recording.calls[place].operator is operator
    return place if is_one else None


def _table(scale: float, zero_point: int, to_scale: float, to_zero_point: int) -> torch.Tensor:
    values = COPY(torch.arange(256).to(torch.uint8), scale, zero_point)
    run = torch.ops.backquant_kernels.quantized.default
    table: torch.Tensor = run(DEQUANTIZE(values), to_scale, to_zero_point)
    return table


def is_dense(layout: Layout, sizes: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """Whether elements lie without holes, dimensions in this order, which have these sizes.

    >>> last = Layout((1, 4, 2, 2), (16, 1, 8, 4), None, torch.uint8)
    >>> is_dense(last, (1, 2, 2, 4), (0, 2, 3, 1)), is_dense(last, (1, 4, 2, 2), (0, 1, 2, 3))
    (True, False)
    """
    step = 1
    for size, dim in zip(sizes[::-1], order[::-1], strict=True):
        if size != 1 and layout.stride[dim] != step:
            return False
        step *= size
    return step > 0


def channels_apart(layout: Layout) -> bool:
    """Whether these are bytes of an image, channels last, of which they may be some channels only.

    >>> half = Layout((1, 4, 2, 2), (32, 1, 16, 8), None, torch.uint8)
    >>> channels_apart(half), channels_apart(half._replace(stride=(16, 4, 2, 1)))
    (True, False)
    """
    if len(layout.size) != 4 or layout.dtype is not torch.uint8:
        return False
    _, c, h, w = layout.size
    between = layout.stride[3]  # of neighbouring pixels
    last = (h * w * between, 1, w * between, between)
    return min(h * w, c) > 1 and between >= c and layout.stride == last


def _read_counts(recording: Recording) -> Counter[str]:
    """How often calls and the result read each tensor, by name."""
    values = [*(call.arguments for call in recording.calls), recording.result]
    return Counter(
        leaf.name for value in values for leaf in tree_flatten(value)[0] if isinstance(leaf, Ref)
    )
