"""Images of floats, plane by plane, that a recording quantizes and then lays out with channels last.

The library of kernels has an operator for both, which writes the bytes once. Its integers are those of the
two operators.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backquant.native.library import is_here
from backquant.runtime.replay.overloads import CLONE
from backquant.runtime.replay.record import Call, Recording
from backquant.runtime.replay.rewriting import Rewriting, is_dense


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
