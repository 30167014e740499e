"""Which operators draw random numbers, and who calls them.

An operator that may draw is asked whether it has: it has moved a generator. Attention draws only with
dropout, dropout only in training mode.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from backquant.graph.dispatch_mode import DispatchMode
from backquant.graph.tracer import frame_line

__all__ = ["Draws"]


class Draws(DispatchMode):
    """While it is open, notes in ``found`` each operator that draws, with the line outside PyTorch that calls
    it (empty where there is none).

    >>> with Draws() as draws:
    ...     _ = torch.rand(2) + torch.nn.functional.dropout(torch.ones(2), 0.5, training=False)
    >>> list(draws.found)
    ['aten.rand.default']
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        before = generator.get_state()
        result = func(*args, **kwargs)
        if generator.device.type != "cpu" or not torch.equal(before, generator.get_state()):
            self.found.setdefault(str(func), frame_line(sys._getframe(1)))
        return result
