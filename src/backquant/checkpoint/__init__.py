"""Checkpoints: the ``state_dict`` of a converted model, ours and ``torch.ao``'s, and how it is loaded."""

from __future__ import annotations

from backquant.checkpoint.load import Loaded, with_state_dict
from backquant.checkpoint.plain import plain_state
from backquant.checkpoint.slots import Slot, slots_of, values_of

__all__ = [
    "Loaded",
    "Slot",
    "plain_state",
    "slots_of",
    "values_of",
    "with_state_dict",
]
