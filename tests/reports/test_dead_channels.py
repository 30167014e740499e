"""Channels of next to no weight beside a bias, as batch norms leave them: integers of input × weight scale do
not hold such a bias, and runtimes that add it so saturate or wrap around."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backquant
from backquant import BackendConfig, DTypeConfig, DTypeWithConstraints
from backquant.operators import entries_of

TINY = 1e-10
BACKENDS = ["xnnpack", "onnxruntime", "openvino", "litert", "tensorrt", "native", "inductor_x86"]
EXAMPLES = ["ethos_u55", "nxp_neutron", "qualcomm_htp", "ti_tidl"]


def _with_dead_channel(layer: nn.Module, axis: int = 0) -> nn.Module:
    with torch.no_grad():
        layer.weight.select(axis, 1).mul_(TINY)  # type: ignore[operator,union-attr]
        layer.bias[1] = 10.0  # type: ignore[index]
    return layer


def convolution() -> tuple[nn.Module, Tensor]:
    first = _with_dead_channel(nn.Conv2d(3, 4, 3))
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 4, 1)), torch.randn(1, 3, 8, 8)


def depthwise() -> tuple[nn.Module, Tensor]:
    middle = _with_dead_channel(nn.Conv2d(4, 4, 3, groups=4))
    return nn.Sequential(nn.Conv2d(3, 4, 1), middle, nn.Conv2d(4, 4, 1)), torch.randn(1, 3, 8, 8)


def batch_norm() -> tuple[nn.Module, Tensor]:
    norm = nn.BatchNorm2d(4)
    nn.init.uniform_(norm.running_var, 0.5, 1.5)
    _with_dead_channel(norm)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 1)), torch.randn(
        1, 3, 8, 8
    )


def linear() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        _with_dead_channel(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)
    ), torch.randn(1, 8)


def transposed() -> tuple[nn.Module, Tensor]:
    first = _with_dead_channel(nn.ConvTranspose2d(4, 4, 3), axis=1)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 4, 1)), torch.randn(1, 4, 8, 8)


class Functional(nn.Module):
    """The weight belongs to the model, the call is a function's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(4))
        _with_dead_channel(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(F.conv2d(x, self.weight, self.bias))


def function() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Functional(), nn.Conv2d(4, 4, 1)), torch.randn(1, 3, 8, 8)


class Twice(nn.Module):
    """One layer reads values of two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _with_dead_channel(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(0.01 * x)))


def twice() -> tuple[nn.Module, Tensor]:
    return Twice(), torch.randn(1, 8)


MODELS = [convolution, depthwise, batch_norm, linear, transposed, function, twice]


def _quantized(
    make: Callable[[], tuple[nn.Module, Tensor]], backend: str | BackendConfig
) -> tuple[nn.Module, Tensor, backquant.QuantizedModel]:
    torch.manual_seed(0)
    model, x = make()
    model.eval()
    batches = [x, *(torch.randn_like(x) for _ in range(7))]
    return model, x, backquant.quantize(model, backend=backend, calibration=batches, require=0.0)


def _decibels(wanted: Tensor, found: Tensor) -> float:
    noise = (wanted - found).detach().square().sum().clamp(min=1e-30)
    return float(10 * torch.log10(wanted.detach().square().sum() / noise))


@pytest.mark.parametrize("backend", [*BACKENDS, *EXAMPLES])
@pytest.mark.parametrize("make", MODELS)
def test_the_bias_is_kept(make: Callable[[], tuple[nn.Module, Tensor]], backend: str) -> None:
    """The reference model, which computes as the runtime does where the description says how."""
    named = f"examples/backends/{backend}.yaml" if backend in EXAMPLES else backend
    model, x, quantized = _quantized(make, named)
    assert _decibels(model(x), quantized(x)) > 25


@pytest.mark.parametrize(
    ("backend", "suffix"), [("xnnpack", "pte"), ("onnxruntime", "onnx"), ("litert", "tflite")]
)
@pytest.mark.parametrize("make", [convolution, linear])
def test_the_runtime_keeps_it(
    make: Callable[[], tuple[nn.Module, Tensor]], backend: str, suffix: str, tmp_path: Path
) -> None:
    """Runtimes round biases to 32 bits themselves; without room -0.3 dB in XNNPACK, -0.2 in ONNX Runtime."""
    _, _, quantized = _quantized(make, backend)
    exported = backquant.export(quantized, tmp_path / f"model.{suffix}")
    assert min(exported.sqnr.values()) > 35


def _chip(dtype: torch.dtype, scale: str, **weight: float) -> BackendConfig:
    value = DTypeWithConstraints(torch.qint8)
    config = DTypeConfig(
        value, value, DTypeWithConstraints(torch.qint8, **weight), dtype, bias_scale=scale
    )
    chip = BackendConfig("chip")
    return chip.set_backend_pattern_configs(
        entries_of(["conv2d", "conv2d+relu", "linear"], [config])
    )


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.int8, "input_times_weight"),
        (torch.int16, "input_times_weight"),
        (torch.int8, "output"),
    ],
)
def test_a_bias_beyond_narrow_integers_is_refused(dtype: torch.dtype, scale: str) -> None:
    """It used to saturate without a word: -1.4 dB."""

    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
    with torch.no_grad():
        first.bias[0] = 40.0  # type: ignore[index]
        first.weight[0] -= 3.0
        second.bias.zero_()  # type: ignore[union-attr]
    model, x = nn.Sequential(first, second).eval(), torch.rand(1, 3, 8, 8)
    quantized = backquant.quantize(model, backend=_chip(dtype, scale), calibration=[x], require=0.0)
    rules = [[reason.rule for reason in row.reasons] for row in quantized.report.operators]
    assert rules == [["bias-range"], []]
    assert _decibels(model(x), quantized(x)) > 20
