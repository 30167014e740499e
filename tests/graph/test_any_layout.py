"""``view`` behind a convolution (whose integer kernel gives a channels-last tensor) and an equation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import backquant


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 4 * 4, 5)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv(x)))
        return self.fc(x.view(x.size(0), -1))


def test_a_view_of_channels_last() -> None:
    model = Viewed().eval()
    batches = [torch.randn(2, 3, 8, 8) for _ in range(4)]
    quantized = backquant.quantize(model, calibration=batches)
    with torch.no_grad():
        wanted = model(batches[0])
    assert (quantized(batches[0]) - wanted).abs().max() < 0.1


class Transposed(nn.Module):
    """Weights that are views of a transposed matrix: linear, and a convolution that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 6))
        self.k = nn.Parameter(torch.randn(6, 4).t()[:, :, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.w.t())
        return nn.functional.conv2d(y[:, :, None, None], self.k)


@pytest.mark.parametrize("backend", ["x86", "onednn", "fbgemm", "qnnpack"])
def test_weights_that_are_not_contiguous(backend: str) -> None:
    model = Transposed().eval()
    batches = [torch.randn(16, 8) for _ in range(3)]
    quantized = backquant.quantize(model, calibration=batches, backend=backend)
    with torch.no_grad():
        wanted = model(batches[0])
    assert (quantized(batches[0]) - wanted).abs().max() < 0.03 * wanted.abs().max()


class Mixed(nn.Module):
    """The view of an equation whose result is laid out otherwise once it is a matrix product."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.into, self.out, self.function = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.into(x).view(2, 2, 4, 6)
        weights = torch.softmax(heads.transpose(2, 3) @ heads, 2)
        mixed = self.function(torch.einsum("bhts,bhct->bhcs", weights, heads))
        return self.out(mixed.view(2, -1, 6))


@pytest.mark.parametrize("function", [nn.Identity(), torch.neg])
@pytest.mark.parametrize("capture", ["trace", "export"])
def test_a_view_of_an_equation(
    capture: str, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = Mixed(function).eval()
    batches = [torch.randn(2, 8, 6) for _ in range(4)]
    quantized = backquant.quantize(
        model, calibration=batches, backend="x86", slower="keep", capture=capture
    )
    with torch.no_grad():
        wanted = model(batches[0])
    assert (quantized(batches[0]) - wanted).abs().max() < 0.1 * wanted.abs().max()
