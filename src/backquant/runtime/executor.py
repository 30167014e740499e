"""The protocol of what runs a lowered graph."""

from __future__ import annotations

from typing import Any, Protocol


class Executor(Protocol):
    """Runs a lowered graph on the model's arguments, and gives what the interpreted graph gives for them.

    >>> import torch
    >>> from backquant.runtime.replay import Replays
    >>> executor: Executor = Replays(torch.nn.ReLU())
    >>> executor(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
