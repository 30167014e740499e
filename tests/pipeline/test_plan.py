"""A trace that does not run as the model does is left for an export."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import backquant
from backquant.errors import CaptureError


@fx.wrap
def fitted(window: list[int], sizes: list[int]) -> list[int]:
    """As torchvision's Swin of videos: changes the list that it is given, which a graph does not allow."""
    for i, size in enumerate(sizes):
        window[i] = min(window[i], size)
    return window


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        rows = fitted([3, 9], [x.shape[1], x.shape[2]])[0]
        return self.second(x[:, :rows])


def test_a_trace_that_does_not_run_is_an_export_by_default() -> None:
    torch.manual_seed(0)
    model, x = Windowed().eval(), torch.randn(2, 5, 4)
    with pytest.raises(CaptureError, match="the traced model fails"):
        backquant.quantize(model, x, calibration=[x], capture="trace", slower="keep")
    result = backquant.quantize(model, x, calibration=[x], slower="keep")
    assert result.report.coverage == 1.0
    assert any("captured by torch.export" in note for note in result.report.notes)
    with torch.no_grad():
        assert (result(x) - model(x)).norm() < 0.05 * model(x).norm()


class Asks(nn.Module):
    """Does something else for what stands for a tensor while it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return y * 3 if type(x) is torch.Tensor else y


def test_a_graph_that_gives_other_values_is_refused(snapshot: Callable[..., None]) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError) as caught:
        backquant.quantize(Asks(), x, calibration=[x])
    snapshot("other_values", str(caught.value))


def test_a_model_that_amplifies_roundings_is_not() -> None:
    class Sorts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.frac(self.fc(x) * 1e9)

    x = torch.randn(3, 4)
    assert backquant.quantize(Sorts(), x, calibration=[x], slower="keep")(x).shape == (3, 4)


class Plain(Asks):
    """Without what depends on how it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * 3


def _quantized(model: nn.Module) -> None:
    backquant.quantize(model, calibration=[torch.randn(3, 4)])


BY_HAND = {
    "write what changes": lambda *_: _quantized(Plain()),
}
