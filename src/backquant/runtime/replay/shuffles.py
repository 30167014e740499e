"""Two images whose channels a recording joins, and then takes in turn.

The library of kernels reads both where they lie: nothing is joined before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from backquant.native.library import is_here
from backquant.operators import overload
from backquant.runtime.replay.reads import channels_apart, read_counts
from backquant.runtime.replay.record import Call, Recording, Ref


def shuffle_parts(recording: Recording) -> Recording:
    """``recording`` without such joins. Cost: linear."""
    if not is_here():
        return recording
    made = {call.outputs[0]: place for place, call in enumerate(recording.calls)}
    read = read_counts(recording)
    calls: list[Call | None] = list(recording.calls)
    for place, call in enumerate(recording.calls):
        if call.operator is not torch.ops.backquant_kernels.shuffled.default:
            continue
        halves = tuple(half.name for half in call.arguments)
        split = made.get(halves, -1)
        join = _join(recording, made, split)
        if join < 0 or any(read[name] != 1 for name in (*halves, *recording.calls[join].outputs)):
            continue
        # where the parts were joined: they may be changed in place behind it
        calls[join] = replace(call, arguments=recording.calls[join].arguments[0])
        calls[split] = calls[place] = None
    return replace(recording, calls=[call for call in calls if call is not None])


def _join(recording: Recording, made: Mapping[Any, int], split: int) -> int:
    """The place of the call that joins two images by channels, which the call at ``split`` takes apart again;
    below 0 if there is none."""
    if split < 0:
        return -1
    joined, _, axis = recording.calls[split].arguments
    place = made.get(joined.name, -1)
    if axis != 1 or place < 0 or recording.calls[place].operator is not overload("cat"):
        return -1
    parts, *rest = recording.calls[place].arguments
    if rest != [1] or len(parts) != 2 or not all(isinstance(part, Ref) for part in parts):
        return -1
    layouts = [recording.layouts[part.name] for part in parts]
    fits = layouts[0].size == layouts[1].size and all(map(channels_apart, layouts))
    return place if fits else -1
