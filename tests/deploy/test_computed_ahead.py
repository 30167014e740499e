"""Products that depend on no input are constants in files of fixed sizes."""

from __future__ import annotations

import torch
from torch import nn

import backquant


class Queries(nn.Module):
    """Queries that are the same for each image, projected before the input is looked at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries = nn.Parameter(torch.randn(5, 16))
        self.project, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.unsqueeze(0).expand(x.shape[0], 5, 16)
        return self.last(self.project(torch.zeros_like(queries) + queries) + x)


def test_they_are_neither_run_nor_counted(tmp_path) -> None:
    x = torch.randn(2, 5, 16)
    quantized = backquant.quantize(Queries().eval(), backend="onnxruntime", calibration=[x])
    before = quantized.code
    exported = backquant.export(quantized, tmp_path / "m.onnx", example_inputs=x)
    assert exported.integer_share == 1.0
    assert "project" not in {node for use in exported.kernels for node in use.nodes}
    assert quantized.code == before
