"""Operators that give a list of tensors (``chunk``, ``split``) where a description has entries for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.stock.catalogue import build, catalogue
from benchmarks.stock.roads import sqnr
from torch import nn

import backquant
from backquant import BackendConfig

BACKENDS = Path(__file__).resolve().parents[2] / "examples" / "backends"
#: Chips whose documents list ``chunk`` and ``split``.
CHIPS = ("esp32_p4", "nxp_neutron", "qualcomm_htp")


class Parted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(self.stem(x), 4, 1)
        return torch.cat((self.one(first), self.two(second)), 1)


class Joined(Parted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(torch.cat(self.stem(x).chunk(2, 1), 2))


def quantized(model: nn.Module, chip: str, x: torch.Tensor) -> backquant.QuantizedModel:
    described = BackendConfig.load(BACKENDS / f"{chip}.yaml")
    return backquant.quantize(model.eval(), x, backend=described, calibration=[x])


@pytest.mark.parametrize("chip", CHIPS)
def test_items_have_the_qparams_of_the_input(chip: str) -> None:
    x = torch.randn(1, 3, 12, 12)
    model = Parted()
    made = quantized(model, chip, x)
    assert made.report.coverage == 1.0
    graph = made.graph_module.graph
    [split] = [node for node in graph.nodes if node.target is torch.split]
    before = split.args[0].args[1:3]
    after = [next(iter(item.users)).args[1:3] for item in split.users]
    assert after == [before, before]
    with torch.no_grad():
        assert sqnr(model(x), made(x)) > 25


@pytest.mark.parametrize("chip", CHIPS)
def test_a_stock_model_runs(chip: str) -> None:
    """Each block of ShuffleNet divides its channels. ESP32's scales are powers of two, one a weight."""
    entry = catalogue()["torchvision.shufflenet_v2_x0_5"]
    model, x = build(entry), entry.sample(1)
    made = quantized(model, chip, x)
    assert made.report.coverage > 0.9
    with torch.no_grad():
        assert sqnr(model(x), made(x)) > 3


def test_a_list_that_is_used_whole_stays_float() -> None:
    x = torch.randn(1, 3, 12, 12)
    model = Joined()
    made = quantized(model, "esp32_p4", x)
    [chunk] = [row for row in made.report.rows if row.node == "chunk"]
    assert chunk.reasons[0].admitted == "the tensors, one by one"
    with torch.no_grad():
        assert sqnr(model(x), made(x)) > 25
