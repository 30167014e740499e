"""What integer products give, read by several operators: OpenVINO would scale it twice for some of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backquant

READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda y: y,
    "maximum": lambda y: F.max_pool2d(y, 2),
    "spread maximum": lambda y: F.max_pool2d(y, 2, dilation=2),
    "average": lambda y: F.avg_pool2d(y, 2),
    "square": lambda y: y * y,
    "factor": lambda y: y * 0.7,
    "clamp": lambda y: y.clamp(-0.5, 0.5),
    "leaky": F.leaky_relu,
    "moved": lambda y: y.transpose(1, 2),
    "larger": lambda y: F.interpolate(y, scale_factor=2),
}


def scaled(layer: Any, factor: float) -> Any:
    """A layer that gives what it reads, times ``factor``: no sums that overflow where the CPU has no VNNI."""
    with torch.no_grad():
        layer.weight.copy_(factor * torch.eye(len(layer.weight)).reshape(layer.weight.shape))
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


class Product(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.one, self.other = scaled(nn.Conv2d(4, 4, 1), factor), scaled(nn.Conv2d(4, 4, 1), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.one(x) @ self.other(x)
        return product


LAYERS: dict[str, Callable[[float], nn.Module]] = {
    "convolution": lambda f: scaled(nn.Conv2d(4, 4, 1), f),
    "transposed": lambda f: scaled(nn.ConvTranspose2d(4, 4, 1, bias=False), f),
    "then-relu": lambda f: nn.Sequential(scaled(nn.Conv2d(4, 4, 1, bias=False), f), nn.ReLU()),
    "linear": lambda f: scaled(nn.Linear(8, 8, bias=False), f),
    "activations": Product,
}


class Pairs(nn.Module):
    """A layer for each two readers; the sine of what each gives."""

    def __init__(self, layer: Callable[[float], nn.Module]) -> None:
        super().__init__()
        pairs = [pair for pair in itertools.combinations(READERS, 2) if "maximum" in "".join(pair)]
        self.pairs = pairs
        self.layers = nn.ModuleList(layer(0.6 + 0.01 * place) for place in range(len(pairs)))

    def forward(self, x: Tensor) -> list[Tensor]:
        made = [layer(x) for layer in self.layers]
        read = zip(made, self.pairs, strict=True)
        return [torch.sin(READERS[name](y)) for y, pair in read for name in pair]


@pytest.mark.parametrize("layer", LAYERS)
def test_each_reader_gets_the_value(layer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.rand(2, 4, 8, 8) - 0.1, tmp_path / "m.xml"
    net = Pairs(LAYERS[layer]).eval()
    model = backquant.quantize(net, backend="openvino", calibration=[x, 2.5 * x])
    exported = backquant.export(
        model, path, example_inputs=x, dynamic_shapes={"x": {0: "batch"}}, require=0.0
    )
    assert not exported.notes
    assert layer in ("transposed", "activations") or exported.integer_share == 1
    compiled = openvino.Core().compile_model(str(path), "CPU")
    results = compiled([x.numpy()])
    for wanted, output in zip(model(x), compiled.outputs, strict=True):
        error = (torch.from_numpy(results[output].copy()) - wanted).norm()
        assert error < 1e-3 * wanted.norm()


class Twice(nn.Module):
    """Two layers of one weight read one value; one of them has a bias."""

    def __init__(self, layer: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.other = layer(bias=True), layer(bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.one(x), self.other(x), self.one(x).relu(), self.other(x).relu()]


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d], ids=["to", "from"])
def test_layers_of_one_weight(layer: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 4, 8, 8) - 0.1
    seven = backquant.default_mapping("openvino", weight_bits=7)  # no sum overflows without VNNI
    net = Twice(lambda bias: layer(4, 6, 3, bias=bias)).eval()
    model = backquant.quantize(
        net, backend="openvino", calibration=[x, 2.5 * x], qconfig_mapping=seven
    )
    exported = backquant.export(model, tmp_path / "m.xml", example_inputs=x, require=0.0)
    assert not exported.notes and min(exported.sqnr.values()) > 60
    assert layer is nn.ConvTranspose2d or exported.integer_share == 1


TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "rounded": lambda y: y,
    "relu": torch.relu,
    "sum": lambda y: torch.relu(y + torch.tensor([0.5, 0.6, 0.7, 0.8])),
    "sigmoid": torch.sigmoid,
    "root": lambda y: (y.abs() + 0.1).sqrt(),
}


class Extremes(nn.Module):
    """The greatest and the least of images, each through every tail to an integer layer."""

    def __init__(self) -> None:
        super().__init__()
        count = 2 * len(TAILS)
        self.before = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(count))
        self.after = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> list[Tensor]:
        reduced = itertools.product((torch.amax, torch.amin), TAILS.values())
        read = zip(self.before, self.after, reduced, strict=True)
        return [after(tail(f(one(x), dim=(2, 3)))) for one, after, (f, tail) in read]


def test_maxima_and_minima_that_are_rounded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, 6, 6)
    seven = backquant.default_mapping("openvino", weight_bits=7)
    model = backquant.quantize(
        Extremes().eval(), backend="openvino", calibration=[x], qconfig_mapping=seven
    )
    exported = backquant.export(model, tmp_path / "m.xml", example_inputs=x)
    assert exported.integer == exported.expected and min(exported.sqnr.values()) > 60


class Sums(nn.Module):
    """Products of one value and one weight, which differ in what is added, each to an integer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(4, 6) - 0.5)
        self.register_buffer("added", torch.rand(6) - 0.5)
        self.before = nn.Linear(4, 4)
        self.after = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        y, factors = self.before(x), (1, 0.5, -0.25)
        made = [torch.addmm(self.added, y, self.weight, beta=f) for f in factors]
        return [layer(value) for layer, value in zip(self.after, made, strict=True)]


def test_sums_with_one_product(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    seven = backquant.default_mapping("openvino", weight_bits=7)
    model = backquant.quantize(
        Sums().eval(), backend="openvino", calibration=[x], qconfig_mapping=seven
    )
    exported = backquant.export(
        model, tmp_path / "m.xml", example_inputs=x, dynamic_shapes={"x": {0: "b"}}, require=0.0
    )
    assert not exported.notes and min(exported.sqnr.values()) > 60
