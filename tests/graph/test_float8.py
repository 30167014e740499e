from __future__ import annotations

import pytest
import torch

import backquant.graph  # noqa: F401 - registers the operators


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_finite_value_is_kept(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()]
    q = torch.ops.backquant.quantize_float8(values * 0.5, 0.5, dtype)
    assert q.dtype == dtype
    assert torch.equal(torch.ops.backquant.dequantize_float8(q, 0.5), values * 0.5)


def test_saturates_and_rounds_to_even() -> None:
    x = torch.tensor([1e6, -1e6, float("inf"), 17.0, 19.0, 0.0])
    q = torch.ops.backquant.quantize_float8(x, 1.0, torch.float8_e4m3fn)
    assert q.float().tolist() == [448.0, -448.0, 448.0, 16.0, 20.0, 0.0]


def test_traces_and_runs_on_meta_tensors() -> None:
    class Pair(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = torch.ops.backquant.quantize_float8(x, 0.5, torch.float8_e4m3fn)
            return torch.ops.backquant.dequantize_float8(q, 0.5)

    x = torch.linspace(-3, 3, 50)
    program = torch.export.export(Pair(), (x,), strict=False)
    targets = {str(node.target) for node in program.graph.nodes}
    assert "backquant.quantize_float8.default" in targets
    assert torch.equal(program.module()(x), Pair()(x))
    assert Pair()(x.to("meta")).shape == x.shape
