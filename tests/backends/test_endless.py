"""Depthwise convolutions that the oneDNN of AOTInductor and OpenVINO never finishes on integers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant


@pytest.mark.parametrize("backend", ["inductor_x86", "openvino"])
@pytest.mark.parametrize("after", [nn.ReLU, nn.ReLU6, nn.Identity])
def test_what_never_ends_stays_float(backend: str, after: type[nn.Module]) -> None:
    def line(channels: int, taps: int) -> nn.Module:
        return nn.Conv2d(channels, channels, (1, taps), groups=channels)

    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 1), line(16, 16), after(), line(16, 13), after()),
        *(nn.Conv2d(16, 32, 1), line(32, 16), after()),
    )
    report = backquant.explain(model.eval(), torch.randn(2, 1, 1, 60), backend=backend)
    in_float = [r.module_path for r in report.rows if r.outcome == "float" and "Conv" in r.operator]
    assert in_float == ["1"]


@pytest.mark.parametrize("backend", ["inductor_x86", "openvino"])
def test_nor_is_it_trained_for_integers(backend: str) -> None:
    """With its batch norm, as EEGNet has it."""
    line = nn.Conv2d(16, 16, (1, 16), groups=16)
    model = nn.Sequential(nn.Conv2d(1, 16, 1), line, nn.BatchNorm2d(16), nn.ReLU())
    mapping = backquant.get_default_qat_qconfig_mapping(backend)
    with pytest.warns(UserWarning, match="16"):
        prepared = backquant.prepare_qat_fx(
            model.train(), mapping, (torch.randn(2, 1, 1, 60),), backend_config=backend
        )
    trained = [m.in_channels for m in prepared.modules() if hasattr(m, "weight_fake_quant")]
    assert trained == [1]
