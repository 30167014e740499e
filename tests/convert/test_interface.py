"""Quantized inputs and outputs, against PyTorch's."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig as TorchCustom
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference
from backquant.errors import ConfigError
from backquant.qconfig import PrepareCustomConfig


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return y, [nn.functional.relu(y), y + 1]


def _both(flow, model, x, inputs=(), outputs=()):
    custom = PrepareCustomConfig()
    custom.set_input_quantized_indexes(list(inputs)).set_output_quantized_indexes(list(outputs))
    theirs_custom = TorchCustom()
    theirs_custom.set_input_quantized_indexes(list(inputs))
    theirs_custom.set_output_quantized_indexes(list(outputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = prepare_fx(
            copy.deepcopy(model),
            flow.torch_mapping(),
            (x,),
            prepare_custom_config=theirs_custom,
            backend_config=flow.torch_backend(),
        )
        ours = flow.prepare(model, custom=custom)
        with torch.no_grad():
            theirs(x)
        calibrate(ours, [x])
        return ours, convert_to_reference_fx(theirs, backend_config=flow.torch_backend())


def test_quantized_input(flow):
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    ours, theirs = _both(flow, model, x, inputs=[0])
    converted = convert_to_reference(ours, dialect="quantized_tensor")
    assert converted.code == theirs.code
    with pytest.raises(ConfigError, match="nothing measured what the integers"):
        convert_to_reference(ours)


@pytest.mark.parametrize("outputs", [[0], [1], [0, 1]])
def test_quantized_outputs(flow, outputs):
    model, x = Two().eval(), torch.randn(2, 4)
    ours, theirs = _both(flow, model, x, outputs=outputs)
    assert convert_to_reference(ours, dialect="quantized_tensor").code == theirs.code
    first, (second, third) = convert_to_reference(ours)(x)
    expected = [0 in outputs, 1 in outputs, 1 in outputs]
    assert [value.dtype == torch.uint8 for value in (first, second, third)] == expected


def test_single_output(flow):
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    ours, theirs = _both(flow, model, x, outputs=[0])
    assert convert_to_reference(ours, dialect="quantized_tensor").code == theirs.code
    assert convert_to_reference(ours)(x).dtype == torch.uint8
