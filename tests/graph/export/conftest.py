from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from backquant.graph import Captured, verify
from backquant.graph.export import ExportOptions, capture_export
from backquant.operators.aten import AtenSpeller


@pytest.fixture
def export() -> Callable[..., Captured]:
    """Capture, and check that the graph computes what the model computes."""

    def make(model: nn.Module, inputs: Any, **options: Any) -> Captured:
        model = model.eval()
        captured = capture_export(model, inputs, AtenSpeller(), ExportOptions(**options))
        verify(captured.module, after="capture")
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        given = ((), inputs) if isinstance(inputs, dict) else (args, {})
        with torch.no_grad():
            wanted, got = model(*given[0], **given[1]), captured.module(*given[0], **given[1])
        if isinstance(wanted, torch.Tensor):
            assert torch.allclose(got, wanted, atol=1e-6)
        return captured

    return make
