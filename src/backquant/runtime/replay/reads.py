"""Who reads the tensors of a recording, and which of them the library of kernels reads where they lie."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._pytree import tree_flatten

from backquant.runtime.replay.record import Layout, Recording, Ref


def read_counts(recording: Recording) -> Counter[str]:
    """How often calls and the result read each tensor, by name.

    >>> read_counts(Recording(("%0",), result=(Ref("%0"), Ref("%0"))))["%0"]
    2
    """
    values = [*(call.arguments for call in recording.calls), recording.result]
    return Counter(
        leaf.name for value in values for leaf in tree_flatten(value)[0] if isinstance(leaf, Ref)
    )


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
