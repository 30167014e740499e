"""Networks with layer norms: what lies between weighted layers stays in float by default."""

from __future__ import annotations

import torch
from torch import nn

import backquant
from backquant.qconfig import get_default_qconfig_mapping


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(8)
        self.wide, self.narrow, self.gelu = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()
        self.register_buffer("order", torch.arange(8)[None])
        self.places = nn.Embedding(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(torch.narrow(self.order, 1, 0, x.size(1))).mean(1)
        return x + self.narrow(self.gelu(self.wide(self.norm(x))))


def quantized(norm: type[nn.Module], **settings: object) -> backquant.QuantizedModel:
    torch.manual_seed(0)
    batches = [torch.randn(4, 8) for _ in range(3)]
    return backquant.quantize(
        Block(norm).eval(), batches[0], backend="x86", calibration=batches, **settings
    )


def test_only_linear_layers_and_their_activations_are_quantized() -> None:
    model = quantized(nn.LayerNorm)
    assert model.audit().kernels == {
        "onednn.qlinear_pointwise(gelu)": 1,
        "onednn.qlinear_pointwise": 1,
    }
    assert (model.audit().quantize, model.audit().dequantize) == (1, 0)
    assert any("layer norms" in note for note in model.report.notes)
    assert not model.report.unused_rules


def test_other_networks_and_other_requests_are_as_ever() -> None:
    plain = quantized(nn.BatchNorm1d)
    assert "mean" in plain.audit().kernels
    asked = quantized(nn.LayerNorm, qconfig_mapping=get_default_qconfig_mapping("x86"))
    assert "add" in asked.audit().kernels
    for model in (plain, asked):
        assert not any("layer norms" in note for note in model.report.notes)


def test_positions_are_no_floats_and_are_not_quantized() -> None:
    model = quantized(nn.BatchNorm1d)
    x = torch.randn(4, 8)
    assert torch.isfinite(model(x)).all()
    narrow = next(row for row in model.report.rows if row.node == "narrow")
    assert narrow.outcome != "quantized"
