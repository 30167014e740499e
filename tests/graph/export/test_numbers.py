"""Integers that modules keep as tensors: sizes computed from them stay sizes in an export."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.graph.export.numbers import (
    NotANumberError,
    Number,
    keeps_numbers,
    kept_as_numbers,
)


class Padded(nn.Module):
    """As EnCodec's convolutions: how much to pad is computed from tensors and the length."""

    def __init__(self, stride: int, mode: str = "constant") -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 7, stride)
        self.register_buffer("stride", torch.tensor(stride), persistent=False)
        self.register_buffer("kernel", torch.tensor(7), persistent=False)
        self.total = self.kernel - self.stride  # no buffer
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        frames = (length - self.kernel + self.total) / self.stride + 1
        frames = torch.ceil(frames).to(torch.int64) - 1
        extra = frames * self.stride + self.kernel - self.total - length
        if self.mode == "reflect" and length <= max(self.total, extra):
            raise RuntimeError("too short")
        right = self.total // 2
        x = F.pad(x, (self.total - right, right + extra), self.mode)
        return torch.relu(self.conv(x))


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_convolutions_padded_by_the_model_run_on_integers_at_any_length(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Padded(4, mode), Padded(2, mode), nn.Conv1d(4, 4, 1)).eval()
    x = torch.randn(2, 4, 64)
    quantized = backquant.quantize(
        model, backend="x86", calibration=[x, x], capture="export", slower="keep"
    )
    assert quantized.report.coverage == 1.0
    for length in (64, 61, 50):
        x = torch.randn(2, 4, length)
        wanted = model(x)
        noise = (quantized(x) - wanted).square().sum()
        assert 10 * torch.log10(wanted.square().sum() / noise) > 20
    assert isinstance(model[0].stride, torch.Tensor) and "stride" in model[0]._buffers


@pytest.mark.parametrize("length", range(1, 40))
@pytest.mark.parametrize("stride", [1, 2, 3, 8])
def test_arithmetic_is_that_of_tensors(length: int, stride: int) -> None:
    def computed(kernel, step):
        frames = (length - kernel) / step + 1
        some = torch.ceil(frames).to(torch.int64) * step - kernel
        return [
            torch.ceil(frames),
            torch.floor(frames),
            frames.long(),
            (length // step) % kernel,
            length % step,
            -some + 2 * kernel,
            frames > 2,
            frames <= step,
            kernel == 5,
        ]

    wanted = computed(torch.tensor(5), torch.tensor(stride))
    found = computed(Number(5), Number(stride))
    assert [int(value) for value in found] == [int(value) for value in wanted]


def test_a_number_in_a_call_with_tensors_is_a_python_number() -> None:
    three, x = Number(3), torch.arange(12.0).view(3, 4)

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.three = torch.tensor(3)

    model = Keeps()
    assert keeps_numbers(model)
    with kept_as_numbers(model):
        assert torch.equal(x * model.three, x * 3)
        assert torch.equal(x[..., : model.three], x[..., :3])
        assert torch.equal(x.view(model.three, -1), x)
        assert torch.equal(F.pad(x, (0, model.three)), F.pad(x, (0, 3)))
        assert model.three.item() == 3 and model.three.dim() == 0
    assert torch.equal(model.three, torch.tensor(3)) and bool(three)


def test_what_is_asked_of_a_tensor_is_refused() -> None:
    with pytest.raises(NotANumberError, match="'add_' is asked of an integer"):
        Number(3).add_(1)
    with pytest.raises(NotANumberError, match="a fraction is no index"):
        range(Number(3) / 2)


class Counting(nn.Module):
    """The next size depends on how often it was called: no number of the architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return F.pad(x, (0, int(self.calls)))


def test_a_counter_is_none() -> None:
    model = Counting()
    with pytest.raises(NotANumberError, match="'calls' is written"), kept_as_numbers(model):
        model(torch.zeros(2))
    assert torch.equal(model.calls, torch.tensor(1)) and "calls" in model._buffers
    whole = nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(6, 4)).eval()
    x = torch.randn(8, 4)
    quantized = backquant.quantize(
        whole, backend="x86", calibration=[x], capture="export", slower="keep"
    )
    assert "writes '1.calls', which the next call reads" in str(quantized.report)
    assert quantized(x).shape == (8, 4)
