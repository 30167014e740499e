"""A recording as it is replayed: without what a call need not do again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from backquant.native.library import is_here
from backquant.operators import overload
from backquant.runtime.replay.kinds import CLONE, COPY, DEQUANTIZE
from backquant.runtime.replay.pass_on import pass_on
from backquant.runtime.replay.record import Call, Layout, Recording, Ref


def shortened(recording: Recording) -> Recording:
    """``recording`` with fewer calls, which gives the same. Cost: linear."""
    steps = (pass_on, quantize_products, quantize_planes, look_up_bytes, shuffle_parts, join_images)
    for step in steps:
        recording = step(recording)
    return recording


# Images of floats, plane by plane, that a recording quantizes and then lays out with channels last.
#
# The library of kernels has an operator for both, which writes the bytes once. Its integers are those of the
# two operators.


def quantize_planes(recording: Recording) -> Recording:
    """``recording`` with one call for each such pair. Cost: linear."""
    if not is_here():
        return recording
    run, made = torch.ops.backquant_kernels, Rewriting(recording)
    for place, call in enumerate(recording.calls):
        if call.operator is not CLONE or call.arguments[1:] != (torch.channels_last,):
            continue
        source = made.made_for(call.arguments[0])
        first = None if source is None else recording.calls[source]
        if source is None or first is None or first.operator is not run.quantized.default:
            continue
        if _is_planes(recording, first):
            # where the floats were quantized: they may be changed in place behind it
            made.calls[source] = replace(
                call, operator=run.quantized_planes.default, arguments=first.arguments
            )
            made.calls[place] = None
    return made.finish()


def _is_planes(recording: Recording, quantized: Call) -> bool:
    layout = recording.layouts[quantized.arguments[0].name]
    return len(layout.size) == 4 and is_dense(layout, layout.size, (0, 1, 2, 3))


# Two images whose channels a recording joins, and then takes in turn.
#
# The library of kernels reads both where they lie: nothing is joined before.


def shuffle_parts(recording: Recording) -> Recording:
    """``recording`` without such joins. Cost: linear."""
    if not is_here():
        return recording
    made = Rewriting(recording)
    for place, call in enumerate(recording.calls):
        if call.operator is not torch.ops.backquant_kernels.shuffled.default:
            continue
        split = made.made_for(call.arguments)
        if split is None or recording.calls[split].arguments[2] != 1:
            continue
        join = made.made_for(recording.calls[split].arguments[0])
        parts = None if join is None else _parts(recording, recording.calls[join])
        if join is not None and parts is not None:
            # where the parts were joined: they may be changed in place behind it
            made.calls[join] = replace(call, arguments=parts)
            made.calls[split] = made.calls[place] = None
    return made.finish()


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


def quantize_products(recording: Recording) -> Recording:
    """``recording`` with one call for each such product. Cost: linear."""
    if not is_here():
        return recording
    run, made = torch.ops.backquant_kernels, Rewriting(recording)
    for place, call in enumerate(recording.calls):
        if call.operator is not run.quantized.default:
            continue
        product = made.made_for(call.arguments[0])
        factors = None if product is None else _factors(recording, recording.calls[product])
        if product is not None and factors is not None:
            # where the product was: what it reads may be changed in place behind it
            arguments = (*factors, *call.arguments[1:])
            made.calls[product] = replace(
                call, operator=run.quantized_product.default, arguments=arguments
            )
            made.calls[place] = None
    return made.finish()


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


def join_images(recording: Recording) -> Recording:
    """``recording`` with one call for each such join. Cost: linear."""
    if not is_here():
        return recording
    run, made = torch.ops.backquant_kernels, Rewriting(recording)
    for place, call in enumerate(recording.calls):
        if _is_join(recording, call):
            made.calls[place] = replace(
                call, operator=run.joined.default, arguments=call.arguments[:1]
            )
        elif call.operator is run.rescaled.default and _is_constant(recording, call.arguments[1]):
            source = made.made_for(call.arguments[0])
            join = None if source is None else made.calls[source]
            if source is not None and join is not None and join.operator is run.joined.default:
                # where the parts were joined: they may be changed in place behind it
                arguments = (*join.arguments, *call.arguments[1:])
                made.calls[source] = replace(
                    call, operator=run.joined_rescaled.default, arguments=arguments
                )
                made.calls[place] = None
    return made.finish()


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


def look_up_bytes(recording: Recording) -> Recording:
    """``recording`` with one call for each such chain. Cost: linear."""
    if not is_here():
        return recording
    made = Rewriting(recording)
    tables: dict[tuple[Any, ...], str] = {}
    found: dict[str, torch.Tensor] = {}
    for place, call in enumerate(recording.calls):
        if call.operator is not torch.ops.backquant_kernels.quantized.default:
            continue
        floats = _made_by(DEQUANTIZE, made, call)
        copied = None if floats is None else _made_by(COPY, made, recording.calls[floats])
        if floats is None or copied is None:
            continue
        copy = recording.calls[copied]
        if not channels_apart(recording.layouts[copy.arguments[0].name]):
            continue
        qparams = (*copy.arguments[1:], *call.arguments[1:])
        if qparams not in tables:
            tables[qparams] = f"%table{len(tables)}"
            found[tables[qparams]] = _table(*qparams)
        # where the bytes were copied: they may be changed in place behind it
        arguments = (copy.arguments[0], Ref(tables[qparams]))
        run = torch.ops.backquant_kernels.looked_up.default
        made.calls[copied] = replace(call, operator=run, arguments=arguments)
        made.calls[floats] = made.calls[place] = None
    layouts = dict.fromkeys(found, Layout((256,), (1,), None, torch.uint8))
    return replace(
        made.finish(),
        constants=recording.constants | found,
        layouts=recording.layouts | layouts,
    )


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

    def made_for(self, value: Any) -> int | None:
        """The place of the call that made ``value``, a tensor that is read once, or a tuple of them, which is
        one list among its results; ``None`` where no call did, or one is read more often."""
        several = isinstance(value, tuple)
        parts = value if several else (value,)
        if not all(isinstance(part, Ref) and self.read[part.name] == 1 for part in parts):
            return None
        names = tuple(part.name for part in parts)
        return self._made.get(names if several else names[0])

    def finish(self) -> Recording:
        """The recording as it is now."""
        return replace(self.recording, calls=[call for call in self.calls if call is not None])


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
