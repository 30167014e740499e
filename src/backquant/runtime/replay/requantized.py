"""Bytes that a recording takes to floats, which become other bytes at once.

A function of one byte: the library of kernels has a table for it, which the operators themselves fill. It
reads channels of an image where they lie, and writes the bytes once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from backquant.native.library import is_here
from backquant.runtime.replay.overloads import COPY, DEQUANTIZE
from backquant.runtime.replay.reads import channels_apart, read_counts
from backquant.runtime.replay.record import Call, Layout, Recording, Ref


def look_up_bytes(recording: Recording) -> Recording:
    """``recording`` with one call for each such chain. Cost: linear."""
    if not is_here():
        return recording
    made = {call.outputs[0]: place for place, call in enumerate(recording.calls)}
    read = read_counts(recording)
    calls: list[Call | None] = list(recording.calls)
    tables: dict[tuple[Any, ...], str] = {}
    found: dict[str, torch.Tensor] = {}
    for place, call in enumerate(recording.calls):
        if call.operator is not torch.ops.backquant_kernels.quantized.default:
            continue
        chain = _chain(recording, made, read, place)
        if chain is None:
            continue
        copy = recording.calls[chain[0]]
        qparams = (*copy.arguments[1:], *call.arguments[1:])
        if qparams not in tables:
            tables[qparams] = f"%table{len(tables)}"
            found[tables[qparams]] = _table(*qparams)
        # where the bytes were copied: they may be changed in place behind it
        arguments = (copy.arguments[0], Ref(tables[qparams]))
        run = torch.ops.backquant_kernels.looked_up.default
        calls[chain[0]] = replace(call, operator=run, arguments=arguments)
        calls[chain[1]] = calls[place] = None
    layouts = recording.layouts | dict.fromkeys(found, Layout((256,), (1,), None, torch.uint8))
    return replace(
        recording,
        calls=[call for call in calls if call is not None],
        constants=recording.constants | found,
        layouts=layouts,
    )


def _chain(
    recording: Recording, made: Mapping[Any, int], read: Mapping[str, int], place: int
) -> tuple[int, int] | None:
    """The places of what makes a quantized tensor, and of what makes floats of it for the call at ``place``;
    ``None`` where something else reads them, or a table does not serve."""
    places = []
    for operator in (DEQUANTIZE, COPY):
        source = recording.calls[place].arguments[0]
        if not isinstance(source, Ref) or read[source.name] != 1 or source.name not in made:
            return None
        place = made[source.name]
        if recording.calls[place].operator is not operator:
            return None
        places.append(place)
    source = recording.calls[place].arguments[0]
    if not channels_apart(recording.layouts[source.name]):
        return None
    return places[1], places[0]


def _table(scale: float, zero_point: int, to_scale: float, to_zero_point: int) -> torch.Tensor:
    values = COPY(torch.arange(256).to(torch.uint8), scale, zero_point)
    run = torch.ops.backquant_kernels.quantized.default
    table: torch.Tensor = run(DEQUANTIZE(values), to_scale, to_zero_point)
    return table
