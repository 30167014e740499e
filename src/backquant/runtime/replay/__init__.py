"""Replay: what a lowered model did once, as one graph that torch runs without Python.

The operators that a call dispatches are recorded, with every size and constant, for one set of input
shapes (``record``), written as a graph of torch's interpreter (``program``), and kept per set of
shapes (``Replays``). What cannot be replayed faithfully is refused with a reason.
"""

from __future__ import annotations

from backquant.runtime.replay.replays import Replays

__all__ = ["Replays"]
