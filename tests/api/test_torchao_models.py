"""A model that torchao has quantized is no float model: refused before anything looks at its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import UsageError

quantization = pytest.importorskip("torchao.quantization")


@pytest.mark.parametrize("call", ["quantize", "explain"])
def test_weights_of_torchao(call: str, snapshot: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(UsageError) as raised:
        getattr(backquant, call)(model, torch.ones(1, 64), backend="x86")
    snapshot("torchao", str(raised.value))


BY_HAND = {
    "pass the float model": lambda *_: backquant.quantize(
        nn.Linear(32, 32), calibration=[torch.ones(2, 32)]
    ),
}
