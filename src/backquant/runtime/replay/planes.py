"""Images of floats, plane by plane, that a recording quantizes and then lays out with channels last.

The library of kernels has an operator for both, which writes the bytes once. Its integers are those of the
two operators.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backquant.native.library import is_here
from backquant.runtime.replay.overloads import CLONE
from backquant.runtime.replay.reads import read_counts
from backquant.runtime.replay.record import Call, Recording, Ref


def quantize_planes(recording: Recording) -> Recording:
    """``recording`` with one call for each such pair. Cost: linear."""
    if not is_here():
        return recording
    run = torch.ops.backquant_kernels
    made = {call.outputs[0]: place for place, call in enumerate(recording.calls)}
    read = read_counts(recording)
    calls: list[Call | None] = list(recording.calls)
    for place, call in enumerate(recording.calls):
        name = _laid_out(call)
        if read[name] != 1 or name not in made:
            continue
        first = recording.calls[made[name]]
        if first.operator is run.quantized.default and _is_planes(recording, first):
            # where the floats were quantized: they may be changed in place behind it
            calls[made[name]] = replace(
                call, operator=run.quantized_planes.default, arguments=first.arguments
            )
            calls[place] = None
    return replace(recording, calls=[call for call in calls if call is not None])


def _laid_out(call: Call) -> str:
    """What ``call`` copies with channels last."""
    if call.operator is not CLONE or call.arguments[1:] != (torch.channels_last,):
        return ""
    source = call.arguments[0]
    return source.name if isinstance(source, Ref) else ""


def _is_planes(recording: Recording, quantized: Call) -> bool:
    layout = recording.layouts[quantized.arguments[0].name]
    step = 1
    for size, stride in zip(layout.size[::-1], layout.stride[::-1], strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return len(layout.size) == 4
