"""Dynamic quantization, float16, weight-only: both dialects, against PyTorch's."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.ao.quantization as tq
from torch import nn
from torch.ao.quantization.quantize_fx import (
    _convert_to_reference_decomposed_fx,
    convert_to_reference_fx,
)

import backquant.qconfig as bq
from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference
from backquant.convert.dialects import is_dequantize
from backquant.errors import UsageError
from backquant.observe import PerChannelMinMaxObserver

_TORCH = {
    "decomposed": _convert_to_reference_decomposed_fx,
    "quantized_tensor": convert_to_reference_fx,
}


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.embedding(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8)
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x):
        y, _ = self.lstm(x)
        return self.cell(y[0])


MODELS = {
    "embeddings": (Embeddings, lambda: torch.tensor([1, 2, 3])),
    "recurrent": (Recurrent, lambda: torch.randn(3, 2, 4)),
}


@pytest.mark.parametrize("dialect", list(_TORCH))
@pytest.mark.parametrize(
    ("model", "qconfig"),
    [
        ("mlp", "default_dynamic_qconfig"),
        ("mlp", "per_channel_dynamic_qconfig"),
        ("mlp", "float16_static_qconfig"),
        ("functional", "per_channel_dynamic_qconfig"),
        ("embeddings", "float_qparams_weight_only_qconfig"),
        ("recurrent", "default_dynamic_qconfig"),
        ("recurrent", "per_channel_dynamic_qconfig"),
    ],
)
def test_equal_to_torch(flow, dialect, model, qconfig):
    if model in MODELS:
        make, example = MODELS[model]
        made, x = make().eval(), example()
    else:
        made, (x, *_) = flow.model(model)
    asked = bq.QConfigMapping().set_global(getattr(bq, qconfig))
    theirs_asked = tq.QConfigMapping().set_global(getattr(tq, qconfig))
    theirs = flow.torch_prepare(copy.deepcopy(made), x, theirs_asked)
    ours = flow.prepare(made, asked)
    assert ours.code == theirs.code
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs(x)
        expected = _TORCH[dialect](theirs, backend_config=flow.torch_backend())
    ours(x)
    converted = convert_to_reference(ours, dialect=dialect)
    if (model, dialect) != ("functional", "decomposed"):  # its weights are integers here
        assert converted.code == expected.code
    if (model, dialect) == ("embeddings", "decomposed"):
        # PyTorch rounds the float zero points of its two dialects differently; we do as its kernel.
        expected = convert_to_reference(ours, dialect="quantized_tensor")
    with torch.no_grad():
        assert torch.equal(converted(x), expected(x))


def test_dynamic_float16_is_a_cast(flow):
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    prepared = flow.prepare(model, bq.QConfigMapping().set_global(bq.float16_dynamic_qconfig))
    x = torch.randn(2, 4)
    for dialect in _TORCH:
        converted = convert_to_reference(prepared, dialect=dialect)
        assert converted.get_submodule("0").weight.dtype == torch.float16
        assert torch.allclose(converted(x), model(x), atol=1e-2)


def test_per_channel_activations(flow):
    model, x = nn.Sequential(nn.ReLU()).eval(), torch.rand(2, 3, 4)
    activation = PerChannelMinMaxObserver.with_args(
        dtype=torch.quint8, ch_axis=1, qscheme=torch.per_channel_affine
    )
    weight = bq.default_qconfig.weight
    asked = bq.QConfigMapping().set_global(bq.QConfig(activation, weight))
    theirs_activation = tq.PerChannelMinMaxObserver.with_args(
        dtype=torch.quint8, ch_axis=1, qscheme=torch.per_channel_affine
    )
    theirs_asked = tq.QConfigMapping().set_global(
        tq.QConfig(theirs_activation, tq.default_qconfig.weight)
    )
    theirs, ours = (
        flow.torch_prepare(copy.deepcopy(model), x, theirs_asked),
        flow.prepare(model, asked),
    )
    theirs(x)
    calibrate(ours, [x])
    for dialect, convert in _TORCH.items():
        expected = convert(copy.deepcopy(theirs), backend_config=flow.torch_backend())
        converted = convert_to_reference(ours, dialect=dialect)
        assert converted.code == expected.code
        assert torch.equal(converted(x), expected(x))


def test_one_dequantize_serves_all_users(flow):
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            return torch.relu(y) + y * y

    prepared = flow.prepare(Fan().eval())
    calibrate(prepared, [torch.randn(2, 4)])
    nodes = convert_to_reference(prepared).graph.nodes
    quantized = [n for n in nodes if "quantize_per_tensor" in n.name and not is_dequantize(n)]
    assert all(len(node.users) == 1 for node in quantized)
    fc = next(node for node in nodes if node.name == "fc")
    [quantize] = fc.users
    [dequantize] = quantize.users
    assert len(dequantize.users) == 2


def test_unknown_dialect(flow):
    prepared = flow.prepare(nn.Sequential(nn.Linear(4, 4)).eval())
    with pytest.raises(UsageError, match="no dialect 'qdq'") as error:
        convert_to_reference(prepared, dialect="qdq")
    assert 'dialect="decomposed" or dialect="quantized_tensor"' in error.value.fix
