"""A value that is read again after an in-place operator changed it, on every engine."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "method": lambda x: x.relu_(),
    "function": torch.relu_,
    "function of no method": F.leaky_relu_,
    "keyword": lambda x: F.relu(x, inplace=True),
    "position": lambda x: F.relu(x, True),
    "clamp": lambda x: F.hardtanh(x, 0.0, 6.0, True),
    "operator": lambda x: operator.iadd(x, x),
}


class Net(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.relu = nn.ReLU(inplace=True)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        before = y * 2.0
        changed = self.relu(y) if self.change is None else self.change(y)
        return torch.cat([before, y, changed], 1)


@pytest.mark.parametrize("name", ["module", *CHANGES])
@pytest.mark.parametrize("backend", ["x86", "onednn", "fbgemm", "qnnpack"])
def test_it_is_read_as_it_was_changed(name: str, backend: str) -> None:
    model = Net(CHANGES.get(name)).eval()
    x = torch.randn(2, 3, 5, 5)
    mapping = backquant.get_default_qconfig_mapping(backend)
    config = backquant.get_backend_config(backend)
    prepared = backquant.prepare_fx(model, mapping, (x,), backend_config=config)
    prepared(x)
    reference = backquant.convert_to_reference_fx(
        prepared, backend_config=config, dialect="decomposed"
    )
    lowered = backquant.convert_fx(prepared, backend_config=config)
    wanted = reference(x)
    step = (wanted.max() - wanted.min()) / 127  # x86 and fbgemm have 7 bits on some CPUs
    assert (lowered(x) - wanted).abs().max() <= 1.01 * step
