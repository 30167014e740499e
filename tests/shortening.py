"""A function as it is recorded, shortened and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from backquant.runtime.replay.program import Program
from backquant.runtime.replay.record import NotReplayable, record
from backquant.runtime.replay.replays import Fastest
from backquant.runtime.replay.shortened import shortened


def operators_of(
    function: Callable[..., torch.Tensor],
    *args: torch.Tensor,
    constants: Iterable[torch.Tensor] = (),
) -> list[Any]:
    """The operators that are left, when replaying them gave the same in the same places. ``constants``: what
    ``function`` reads beside ``args``."""
    expected, recording = record(function, args, {}, lambda: constants)
    assert not isinstance(recording, NotReplayable)
    made = shortened(recording)
    found = Program(made)(list(args))
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    return [call.operator for call in made.calls]


def graph_of(program: Any) -> str:
    """The graph of a recording, of the whole batch if samples are computed one by one, too."""
    whole = program.ways[0] if isinstance(program, Fastest) else program
    return str(whole._function.graph)
