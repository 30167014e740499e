from __future__ import annotations

import gc
import weakref

import torch
from torch import fx, nn

import backquant
from backquant.graph import released


def test_a_released_module_goes_without_the_collector() -> None:
    module = fx.symbolic_trace(nn.ReLU())
    watched = weakref.ref(module)
    released(module)
    gc.disable()
    try:
        del module
        assert watched() is None
    finally:
        gc.enable()


def test_quantizing_leaves_the_collector_on() -> None:
    """Other threads' garbage is collected meanwhile."""
    states = []

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states.append(gc.isenabled())
            return x.relu()

    model = nn.Sequential(nn.Linear(4, 4), Watched())
    backquant.quantize(model, backend="x86", calibration=[torch.randn(8, 4)])
    assert states and all(states)
