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
