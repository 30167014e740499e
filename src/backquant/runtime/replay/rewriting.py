"""Recordings of which calls that stand behind each other become one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from backquant.runtime.replay.record import Call, Layout, Recording, Ref


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
