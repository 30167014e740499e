"""Pooling of all that there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import backquant
from backquant.graph import GraphRewriter
from backquant.operators.normal_form import whole_pool

WHOLE: dict[str, Any] = {
    "sizes of a slice": lambda x: F.avg_pool2d(x, x.size()[2:]),
    "shape from the end": lambda x: F.avg_pool2d(x, kernel_size=x.shape[-2:]),
    "one by one": lambda x: F.max_pool2d(x, (x.size(2), x.size(3))),
    "named": lambda x: F.avg_pool2d(x, (x.shape[-2], x.shape[3]), padding=0),
    "one axis": lambda x: F.avg_pool1d(x.flatten(2), x.flatten(2).shape[-1]),
}
OTHER: dict[str, Any] = {
    "of another": lambda x: F.avg_pool2d(x, x.relu().size()[2:]),
    "the other way round": lambda x: F.avg_pool2d(x, (x.size(3), x.size(2)), padding=0),
    "with a stride": lambda x: F.avg_pool2d(x, x.size()[2:], 1),
    "one number": lambda x: F.avg_pool2d(x, x.shape[-1]),
    "by batch": lambda x: F.avg_pool2d(x, x.size()[:2]),
}


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "one axis"])
def test_it_is_global_pooling(name: str) -> None:
    module = fx.symbolic_trace(WHOLE[name])
    assert GraphRewriter(module).apply(whole_pool) == 1
    assert len(module.graph.nodes) == 3
    for size in ((2, 3, 5, 7), (1, 3, 4, 4)):
        x = torch.randn(size)
        torch.testing.assert_close(module(x), WHOLE[name](x))


@pytest.mark.parametrize("name", OTHER)
def test_other_windows_stay(name: str) -> None:
    assert GraphRewriter(fx.symbolic_trace(OTHER[name])).apply(whole_pool) == 0


def test_what_is_named_stays() -> None:
    kept = GraphRewriter(fx.symbolic_trace(WHOLE["named"]), kept={F.avg_pool2d})
    assert kept.apply(whole_pool) == 0


class Squeezed(nn.Module):
    """As older networks squeeze, with a variance whose size is read, as braindecode's SSTDPN has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x))
        return self.fc(F.avg_pool1d(y, y.shape[-1]).flatten(1))


def test_a_model_is_quantized_and_saved(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = Squeezed().eval(), torch.randn(2, 3, 12)
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    backquant.save(quantized, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    for size in (12, 20):
        other = torch.randn(2, 3, size)
        assert torch.equal(loaded(other), quantized(other))
        noise = (loaded(other) - model(other)).square().sum()
        assert noise < 0.02 * model(other).square().sum()
