"""Results that only float operators read are not quantized by default."""

from __future__ import annotations

import torch
from torch import nn

import backquant
from backquant.backend_config import BackendDefaults, QuantDefault


class Attention(nn.Module):
    """Projections that a float operator reads through views, and one that an integer operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(2, 5, 2, 4).transpose(1, 2)
        kv = self.kv(x).view(2, 5, 2, 4).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, kv, kv)
        return self.last(self.out(y.transpose(1, 2).reshape(2, 5, 8)))


def _quantizes(model: backquant.QuantizedModel) -> int:
    return sum("quantize" in str(n.target) for n in model.graph_module.graph.nodes)


def test_projections_of_attention() -> None:
    model = Attention().eval()
    batches = [torch.randn(2, 5, 8) for _ in range(4)]
    ours = backquant.quantize(model, calibration=batches)
    asked = backquant.quantize(
        model,
        calibration=batches,
        qconfig_mapping=backquant.get_default_qconfig_mapping("x86"),
    )
    # q and kv, read by attention, and the last one, read by nobody; that of out is read by last
    assert any(note.startswith("3 results of") for note in ours.report.notes)
    assert not any("results of" in note for note in asked.report.notes)
    dtypes = [k.dtype for k in ours.kernels if "linear" in k.kernel]
    assert dtypes == [torch.float32, torch.float32, torch.uint8, torch.float32]
    with torch.no_grad():
        wanted = model(batches[0])
    errors = [float((q(batches[0]) - wanted).abs().mean()) for q in (ours, asked)]
    assert errors[0] < errors[1]


def test_the_field() -> None:
    minmax = QuantDefault("minmax")
    defaults = BackendDefaults(minmax, minmax, quantized_outputs="where_read")
    assert BackendDefaults.from_dict(defaults.to_dict()) == defaults
    assert "where_read" in repr(defaults)
