"""Tokens split at a fixed length leave batches without a row: every flow returns a result without rows.

onnxruntime#23600: linear layers that are quantized at each call failed where the float model runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import backquant
from backquant import QConfigMapping
from backquant.api.fx import convert_fx, convert_to_reference_fx, prepare_fx
from backquant.qconfig import build as named

EXAMPLE = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
EMPTY = EXAMPLE[:0]
BACKENDS = (
    "x86",
    "onednn",
    "fbgemm",
    "qnnpack",
    "onnxruntime",
    "openvino",
    "executorch",
    "xnnpack",
)
DYNAMIC = ("default_dynamic_qconfig", "per_channel_dynamic_qconfig", "float16_dynamic_qconfig")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


@pytest.mark.filterwarnings("ignore:.*stay float:UserWarning")
@pytest.mark.parametrize("convert", [convert_fx, convert_to_reference_fx])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qconfig", DYNAMIC)
def test_quantized_at_each_call(
    qconfig: str, backend: str, convert: Callable[..., nn.Module]
) -> None:
    mapping = QConfigMapping().set_global(getattr(named, qconfig))
    model = convert(
        prepare_fx(mlp(), mapping, (EXAMPLE,), backend_config=backend), backend_config=backend
    )
    full = model(EXAMPLE)
    assert model(EMPTY).shape == (0, 8)
    assert torch.equal(model(EXAMPLE), full)  # nothing of the empty batch is left


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized_statically(backend: str) -> None:
    quantized = backquant.quantize(mlp(), EXAMPLE, backend=backend, calibration=[EXAMPLE])
    assert quantized(EMPTY).shape == (0, 8)


@pytest.mark.filterwarnings("ignore:.*stay float:UserWarning")
def test_an_empty_input_of_one_layer_inside() -> None:
    class Router(nn.Module):
        """Tokens of two experts, of which one may have none."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, tokens: torch.Tensor, split: int) -> torch.Tensor:
            return torch.cat([self.first(tokens[:split]), self.second(tokens[split:])])

    mapping = QConfigMapping().set_global(named.default_dynamic_qconfig)
    for split in (0, 2, 4):
        example = (EXAMPLE, split)
        prepared = prepare_fx(Router().eval(), mapping, example, backend_config="onnxruntime")
        model = convert_to_reference_fx(prepared, backend_config="onnxruntime")
        assert model(*example).shape == (4, 8)
