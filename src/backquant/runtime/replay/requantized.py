"""Bytes that a recording takes to floats, which become other bytes at once.

A function of one byte: the library of kernels has a table for it, which the operators themselves fill. It
reads channels of an image where they lie, and writes the bytes once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from backquant.native.library import is_here
from backquant.runtime.replay.overloads import COPY, DEQUANTIZE
from backquant.runtime.replay.record import Call, Layout, Recording, Ref
from backquant.runtime.replay.rewriting import Rewriting, channels_apart


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
