"""Averages of integers that count their padding: OpenVINO pads with 0 in place of the zero point."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.session import load_exported


class Pooled(nn.Module):
    """A pooling of what a layer reads as integers, read as floats and by a layer."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.one, self.other, self.after = (nn.Conv2d(4, 4, 1) for _ in range(3))
        for layer in (self.one, self.after):
            nn.init.dirac_(layer.weight)  # no sums that overflow where the CPU has no VNNI
        self.pool = pool

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.one(x)
        return self.other(y), torch.sin(self.pool(y)), self.after(self.pool(y))


@pytest.mark.parametrize(
    "pool",
    [nn.AvgPool2d(3, 2, 1), nn.AvgPool2d((3, 2), (1, 2), (1, 0)), nn.AvgPool2d(3, 2, 1, True)],
    ids=["all sides", "one axis", "ceil"],
)
def test_padding_is_zero(pool: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.rand(2, 4, 9, 8), tmp_path / "m.xml"
    model = backquant.quantize(Pooled(pool).eval(), x, backend="openvino", calibration=[x])
    backquant.export(model, path, require=0.0)
    wanted, found = model(x), [*map(torch.as_tensor, load_exported(path, 1).run([x.numpy()]))]
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-3, atol=1e-3)


class Moved(nn.Module):
    """Values that go round at the sides, and parts of a batch of any size, between layers on integers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.after = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.one(x)
        wrapped = torch.nn.functional.pad(y, (1, 2, 0, 3), mode="circular")
        return [self.after(value) for value in (wrapped, *y.chunk(1), *y.split(3))]


@pytest.mark.parametrize(("backend", "name"), [("openvino", "m.xml"), ("onnxruntime", "m.onnx")])
def test_wrapped_values_and_parts_of_a_batch(backend: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, seven = torch.rand(2, 4, 9, 8), backquant.default_mapping(backend, weight_bits=7)
    model = backquant.quantize(
        Moved().eval(), backend=backend, calibration=[x], qconfig_mapping=seven, capture="export"
    )
    free = {"x": {0: "batch<=3"}}
    exported = backquant.export(
        model, tmp_path / name, example_inputs=x, dynamic_shapes=free, require=0.0
    )
    assert not exported.notes and min(exported.sqnr.values()) > 60
