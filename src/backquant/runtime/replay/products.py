"""Products of floats that a recording quantizes at once.

An image times one number a channel, as a gate of a squeeze-and-excitation block is, and of which only
integers are read: the library of kernels has an operator for both, which writes no floats. Its integers are
those of the two operators.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backquant.native.library import is_here
from backquant.operators import overload
from backquant.runtime.replay.reads import read_counts
from backquant.runtime.replay.record import Call, Layout, Recording, Ref


def quantize_products(recording: Recording) -> Recording:
    """``recording`` with one call for each such product. Cost: linear."""
    if not is_here():
        return recording
    run = torch.ops.backquant_kernels
    made = {call.outputs[0]: place for place, call in enumerate(recording.calls)}
    read = read_counts(recording)
    calls: list[Call | None] = list(recording.calls)
    for place, call in enumerate(recording.calls):
        name = call.arguments[0].name if call.operator is run.quantized.default else ""
        if read[name] != 1 or name not in made:
            continue
        factors = _factors(recording, recording.calls[made[name]])
        if factors is not None:
            # where the product was: what it reads may be changed in place behind it
            arguments = (*factors, *call.arguments[1:])
            calls[made[name]] = replace(
                call, operator=run.quantized_product.default, arguments=arguments
            )
            calls[place] = None
    return replace(recording, calls=[call for call in calls if call is not None])


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
    is_last = _is_dense(image, (n, h, w, c), (0, 2, 3, 1)) and h * w > 1
    return is_last and gate.size == (n, c, 1, 1) and _is_dense(gate, gate.size, (0, 1, 2, 3))


def _is_dense(layout: Layout, sizes: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """Whether elements lie without holes, dimensions in this order, which have these sizes."""
    step = 1
    for size, dim in zip(sizes[::-1], order[::-1], strict=True):
        if size != 1 and layout.stride[dim] != step:
            return False
        step *= size
    return step > 0
