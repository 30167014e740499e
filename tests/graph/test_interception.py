"""Whether somebody follows the operators that are called."""

from __future__ import annotations

import torch
from torch import nn

from backquant.graph import interception


def test_this_torch_has_all_that_is_asked() -> None:
    """Where it lacks one, nothing is recorded, and models are slower without an error."""
    assert interception.missing == ""


def test_a_symbolic_trace_follows_calls() -> None:
    seen = []

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(interception.is_watched())
            return x + 1

    model = Asks()
    model(torch.ones(1))
    torch.fx.symbolic_trace(model)
    model(torch.ones(1))
    assert seen == [False, True, False]
