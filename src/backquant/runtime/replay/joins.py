"""Images of bytes whose channels a recording puts behind each other.

The library of kernels writes them at once, channels last; what is only scaled by channel behind it is scaled
while it is written. Its integers are those of the operators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from backquant.native.library import is_here
from backquant.operators import overload
from backquant.runtime.replay.record import Call, Recording, Ref
from backquant.runtime.replay.rewriting import Rewriting, channels_apart, is_dense


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
