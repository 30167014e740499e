"""Who reads the tensors of a recording."""

from __future__ import annotations

from collections import Counter

from torch.utils._pytree import tree_flatten

from backquant.runtime.replay.record import Recording, Ref


def read_counts(recording: Recording) -> Counter[str]:
    """How often calls and the result read each tensor, by name.

    >>> read_counts(Recording(("%0",), result=(Ref("%0"), Ref("%0"))))["%0"]
    2
    """
    values = [*(call.arguments for call in recording.calls), recording.result]
    return Counter(
        leaf.name for value in values for leaf in tree_flatten(value)[0] if isinstance(leaf, Ref)
    )
