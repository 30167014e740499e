"""What PyTorch's observers measured, in a model prepared here."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
from torch import nn
from torch.ao.quantization.backend_config import get_qnnpack_backend_config
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config
from torch.ao.quantization.quantize_fx import (
    _convert_to_reference_decomposed_fx,
    convert_fx,
    prepare_fx,
    prepare_qat_fx,
)

import backquant
from backquant.errors import CalibrationError, UsageError
from backquant.interop import with_torch_ao_calibration

BACKENDS = {"x86": get_x86_backend_config, "qnnpack": get_qnnpack_backend_config}


class Net(nn.Module):
    """A fused convolution, a skip connection, shared observers, fixed qparams, a functional weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.more, self.pool = nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1)
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        x = torch.cat([self.more(x) + x, x], 1)
        return torch.sigmoid(nn.functional.linear(self.pool(x).flatten(1), self.weight))


def _prepared(model: nn.Module, name: str, x: torch.Tensor, prepare: Any = prepare_fx) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapping = tq.get_default_qconfig_mapping(name)
        return prepare(copy.deepcopy(model), mapping, (x,), backend_config=BACKENDS[name]())


@pytest.mark.parametrize("name", BACKENDS)
def test_the_reference_model_is_pytorchs(name: str) -> None:
    model, x = Net().eval(), torch.randn(4, 2, 8, 8)
    theirs = _prepared(model, name, x)
    backend = backquant.get_backend_config(name)
    mapping = backquant.from_torch_ao(tq.get_default_qconfig_mapping(name))
    ours = backquant.prepare_fx(model, mapping, (x,), backend_config=backend)
    with pytest.raises(CalibrationError, match="saw no data") as caught:
        with_torch_ao_calibration(ours, theirs)
    assert caught.value.where == "activation_post_process_0"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            theirs(torch.randn(4, 2, 8, 8))
        made = with_torch_ao_calibration(ours, theirs)
        expected = _convert_to_reference_decomposed_fx(
            copy.deepcopy(theirs), backend_config=BACKENDS[name]()
        )
        reference = backquant.convert_to_reference_fx(made, dialect="decomposed")
        assert torch.equal(reference(x), expected(x))
        lowered = backquant.convert_fx(made)
        assert len(lowered.kernels) >= 5
        torch.testing.assert_close(lowered(x), expected(x), rtol=0, atol=3 / 256)
    # ours was not changed: it still waits for data
    assert torch.isinf(ours.get_submodule("activation_post_process_0").min_val).all()


def test_what_is_refused() -> None:
    model, x = Net().eval(), torch.randn(4, 2, 8, 8)
    mapping = backquant.get_default_qconfig_mapping("x86")
    ours = backquant.prepare_fx(model, mapping, (x,))
    theirs = _prepared(model, "x86", x)
    theirs(x)
    with pytest.raises(UsageError, match="before convert_fx"):
        with_torch_ao_calibration(ours, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = convert_fx(copy.deepcopy(theirs))
    with pytest.raises(UsageError, match="before convert_fx"):
        with_torch_ao_calibration(ours, converted)
    with pytest.raises(UsageError, match="is prepared for training"):
        with_torch_ao_calibration(ours, _prepared(model.train(), "x86", x, prepare_qat_fx))
    qat = backquant.prepare_qat_fx(model, backquant.get_default_qat_qconfig_mapping("x86"), (x,))
    with pytest.raises(UsageError, match="is prepared for training"):
        with_torch_ao_calibration(qat, theirs)
    less = backquant.get_default_qconfig_mapping("qnnpack")  # 8 bits for activations, x86 has 7
    other = backquant.prepare_fx(model.eval(), less, (x,))
    with pytest.raises(UsageError, match=r"observes \d values otherwise") as caught:
        with_torch_ao_calibration(other, theirs)
    assert caught.value.where.startswith("x, conv")
    again = backquant.prepare_fx(Net().eval(), mapping, (x,))
    with pytest.raises(UsageError, match="other weights"):
        with_torch_ao_calibration(again, theirs)
