"""A tensor that is changed through a view: exported, refused, or noted, never lost in silence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import CaptureError


class Halved(nn.Module):
    """The first channels are halved in place, as shift and normalisation layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x[:, :4].mul_(0.5)
        return self.last(x)


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_an_export_keeps_the_change() -> None:
    model = Halved().eval()
    quantized = backquant.quantize(model, X, calibration=[X])
    noise = (model(X) - quantized(X)).detach()
    assert 10 * torch.log10(model(X).detach().pow(2).sum() / noise.pow(2).sum()) > 30


def test_a_trace_refuses_it() -> None:
    with pytest.raises(CaptureError, match="changes a tensor in place") as caught:
        backquant.quantize(Halved().eval(), X, calibration=[X], capture="trace")
    assert 'capture="export"' in str(caught.value)


def test_prepare_fx_exports_it_and_says_so() -> None:
    mapping = backquant.get_default_qconfig_mapping("x86")
    prepared = backquant.prepare_fx(Halved().eval(), mapping, (X,), backend_config="x86")
    assert any("changes a tensor in place" in note for note in prepared.report.notes)
