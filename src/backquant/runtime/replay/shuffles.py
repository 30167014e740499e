"""Two images whose channels a recording joins, and then takes in turn.

The library of kernels reads both where they lie: nothing is joined before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from backquant.native.library import is_here
from backquant.operators import overload
from backquant.runtime.replay.record import Call, Recording, Ref
from backquant.runtime.replay.rewriting import Rewriting, channels_apart


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
