"""Complex numbers that a model makes of floats are in the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import backquant


class Waves(nn.Module):
    """As the last layers of a vocoder: magnitudes and phases, and the signal behind them."""

    def __init__(self, spectrum: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spectrum, self.linear = spectrum, nn.Linear(8, 34)

    def forward(self, x: Tensor) -> Tensor:
        size, phase = self.linear(x).chunk(2, -1)
        return torch.fft.irfft(self.spectrum(size, phase), 32, dim=-1)


@pytest.mark.parametrize(
    "spectrum",
    [
        lambda size, phase: size.exp() * (phase.cos() + 1j * phase.sin()),
        lambda size, phase: (phase.sin() * 1j + phase.cos()) * size,
        lambda size, phase: phase.cos() - (0.5 + 2j) * size,
        lambda size, phase: torch.complex(size, phase) - size.exp(),
    ],
)
def test_floats_beside_complex_numbers(
    spectrum: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    x, path = torch.randn(2, 3, 8), tmp_path / "m.onnx"
    made = backquant.quantize(Waves(spectrum).eval(), x, backend="onnxruntime", calibration=[x])
    backquant.export(made, path, example_inputs=x)
    [found] = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), made(x), rtol=0, atol=0.02)
