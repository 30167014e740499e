"""A recording as it is replayed: without what a call need not do again."""

from __future__ import annotations

from backquant.runtime.replay.joins import join_images
from backquant.runtime.replay.pass_on import pass_on
from backquant.runtime.replay.planes import quantize_planes
from backquant.runtime.replay.products import quantize_products
from backquant.runtime.replay.record import Recording
from backquant.runtime.replay.requantized import look_up_bytes
from backquant.runtime.replay.shuffles import shuffle_parts


def shortened(recording: Recording) -> Recording:
    """``recording`` with fewer calls, which gives the same. Cost: linear."""
    steps = (pass_on, quantize_products, quantize_planes, look_up_bytes, shuffle_parts, join_images)
    for step in steps:
        recording = step(recording)
    return recording
