"""An operator that files may not call with what a model gives it, named by who trusts the file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import ArtifactError


class Repeated(nn.Module):
    """Each position as often as the second input says: durations of a speech model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, repeats: torch.Tensor) -> torch.Tensor:
        return self.last(torch.repeat_interleave(self.first(x), repeats, dim=1))


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_the_error_says_what_to_pass(capture, tmp_path) -> None:
    x, path = torch.randn(2, 3, 4), tmp_path / "model.bq"
    batch = (x, torch.tensor([1, 2, 1]))
    model = backquant.quantize(
        Repeated().eval(), batch, backend="x86", calibration=[batch], capture=capture
    )
    with pytest.raises(ArtifactError, match="repeats that is computed") as caught:
        backquant.save(model, path)
    assert not path.exists()
    name = caught.value.fix.partition("allow=['")[2].partition("'")[0]
    backquant.save(model, path, allow=[name])
    with pytest.raises(ArtifactError):
        backquant.load(path)
    loaded = backquant.load(path, allow=[name])
    assert torch.equal(loaded(*batch), model(*batch))
    assert loaded(x, torch.tensor([1, 2, 4])).shape == (2, 7, 4)


class Turned(nn.Module):
    """``x.T`` and ``x.H``, which an export writes as operators of their own (kornia's DISK)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        value = self.layer(x)
        return value.T, value.H, value.mT


class Drawn(nn.Module):
    """Draws in place, which an export writes as an operator that gives a new tensor (vit_pytorch's ATS)."""

    def __init__(self, draw: str, *args: float) -> None:
        super().__init__()
        self.layer, self.draw, self.args = nn.Linear(4, 4), draw, args

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.layer(x)
        noise: torch.Tensor = getattr(torch.zeros_like(value), self.draw)(*self.args)
        return value + noise


@pytest.mark.parametrize("capture", ["trace", "export"])
@pytest.mark.parametrize(
    "draw",
    [("uniform_",), ("normal_",), ("exponential_",), ("log_normal_",), ("geometric_", 0.5)],
    ids=lambda draw: draw[0],
)
def test_what_is_drawn_in_place(capture, draw, tmp_path) -> None:
    x, path = torch.randn(3, 4), tmp_path / "model.bq"
    model = backquant.quantize(Drawn(*draw).eval(), x, calibration=[x], capture=capture)
    backquant.save(model, path)
    loaded, drawn = backquant.load(path), []
    for each in (model, loaded):
        torch.manual_seed(0)
        drawn.append(each(x))
    assert torch.equal(*drawn)


class Distinct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = self.layer(x)
        return value, torch.unique(value.mul(4).round())


@pytest.mark.parametrize("capture", ["trace", "export"])
@pytest.mark.parametrize("kind", [Turned, Distinct])
def test_transposed_matrices_and_distinct_values(kind, capture, tmp_path) -> None:
    x, path = torch.randn(3, 4), tmp_path / "model.bq"
    model = backquant.quantize(kind().eval(), x, calibration=[x], capture=capture)
    backquant.save(model, path)
    assert all(map(torch.equal, backquant.load(path)(x), model(x)))
