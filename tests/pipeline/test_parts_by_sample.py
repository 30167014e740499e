"""``backquant.pipeline.by_sample``: channels whose sizes differ from sample to sample, in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant


def _layer(channels: int = 64) -> nn.Module:
    """Reads the second half of its channels with weights that are a hundred times as large."""
    torch.manual_seed(0)
    layer = nn.Conv1d(channels, 16, 3, bias=False)
    with torch.no_grad():
        layer.weight[:, channels // 2 :] *= 100
    return nn.Sequential(layer).eval()


def _tones(differ: bool, count: int = 4, channels: int = 64) -> list[torch.Tensor]:
    """Loud and quiet samples; in quiet ones the second half of the channels is a hundredth of the first."""
    made = torch.Generator().manual_seed(1)
    loud = torch.logspace(0, -3, 8).reshape(8, 1, 1)
    high = torch.ones(8, channels, 1)
    if differ:
        high[:, channels // 2 :] = torch.logspace(0, -2, 8).reshape(8, 1, 1)
    return [torch.randn(8, channels, 24, generator=made) * loud * high for _ in range(count)]


def _least(model: nn.Module, found: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        wanted, got = model(x), found(x)
    noise = (wanted - got).square().sum((1, 2))
    return float((10 * torch.log10(wanted.square().sum((1, 2)) / noise)).min())


@pytest.mark.parametrize("backend", ["x86", "openvino"])
def test_channels_that_differ_from_sample_to_sample_are_scaled_in_parts(backend: str) -> None:
    model, data = _layer(), _tones(differ=True)
    found = backquant.quantize(model, backend=backend, calibration=data, slower="keep")
    assert found.plan.by_sample["_0"].parts == 2
    rows = {row.module_path: row.outcome for row in found.report.rows if row.operator == "Conv1d"}
    assert rows == {"0": "quantized", "0_part_1": "quantized"}
    assert _least(model, found, _tones(differ=True, count=5)[-1]) > 35


@pytest.mark.parametrize(
    ("backend", "differ", "channels"),
    [("x86", False, 64), ("x86", True, 62), ("onnxruntime", True, 64)],
)
def test_others_stay_whole(backend: str, differ: bool, channels: int) -> None:
    """Channels that keep their proportions; too few of them; results that would be rounded in parts, too."""
    model, data = _layer(channels), _tones(differ, channels=channels)
    found = backquant.quantize(model, backend=backend, calibration=data, slower="keep")
    assert found.plan.by_sample["_0"].parts == 1


def test_parts_are_saved_and_loaded(tmp_path: object) -> None:
    model, data = _layer(), _tones(differ=True)
    found = backquant.quantize(model, calibration=data, slower="keep")
    path = f"{tmp_path}/model.bq"
    backquant.save(found, path)
    loaded = backquant.load(path)
    assert torch.equal(loaded(data[0]), found(data[0]))
    assert backquant.compare(model, loaded, data).sqnr > 35
