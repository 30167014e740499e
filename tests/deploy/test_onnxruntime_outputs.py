"""Outputs that are quantized for a reader inside: ONNX Runtime must not give the quantized value."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import torch
from torch import nn

import backquant


class Cached(nn.Module):
    """A step of attention: the keys so far are an output, and, turned, a factor of a quantized product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.cat([past, self.key(x)], 1)
        return self.query(x) @ keys.transpose(1, 2), keys


def test_a_cache_is_as_the_model_computes_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = torch.randn(2, 1, 8), torch.randn(2, 4, 8)
    quantized = backquant.quantize(
        Cached().eval(), small, backend="onnxruntime", calibration=[small]
    )
    exported = backquant.export(quantized, tmp_path / "m.onnx")
    assert exported.integer_share == 1.0
    inputs = small[0], 3 * small[1]  # beyond what was calibrated: a quantized cache is clipped
    session = onnxruntime.InferenceSession(
        str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"]
    )
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    scores, keys = map(torch.from_numpy, session.run(None, feed))
    wanted = quantized(*inputs)
    torch.testing.assert_close(keys, wanted[1], rtol=0, atol=1e-2)
    assert 10 * torch.log10(wanted[0].square().sum() / (wanted[0] - scores).square().sum()) > 30
