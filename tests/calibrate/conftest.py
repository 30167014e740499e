"""Prepared models to calibrate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from backquant.backend_config import get_x86_backend_config
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import make_plan, plan_fusion
from backquant.prepare import Record, insert_observers
from backquant.qconfig import QConfig, QConfigMapping, get_default_qconfig_mapping


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x, y, scale=1.0):
        x = self.first(x)
        return torch.cat([x, self.second(y) * scale], 1)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.drop(torch.relu(self.conv(x)).mean([2, 3])))


class Makers:
    two_inputs = TwoInputs
    conv_net = ConvNet

    def prepare(self, model: nn.Module, activation: Any = None) -> fx.GraphModule:
        mapping = get_default_qconfig_mapping("x86")
        if activation is not None:
            weight = mapping.global_qconfig.weight
            mapping = QConfigMapping().set_global(QConfig(activation, weight))
        backend = get_x86_backend_config()
        captured = capture(model)
        fusions = plan_fusion(captured.module, backend)
        fused = apply_fusion(captured.module, captured.scopes, fusions, backend, False)
        planned = make_plan(fused.module, fused.scopes, backend, mapping, fusions=fusions)
        return insert_observers(
            fused.module,
            Record(planned, backend, mapping, scopes=fused.scopes, provenance=fused.provenance),
        )


@pytest.fixture
def makers() -> Makers:
    return Makers()
