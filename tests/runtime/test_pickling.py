from __future__ import annotations

import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant as bq
from backquant.errors import ArtifactError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc(torch.sin(x).mean([2, 3]))


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("way", [through_pickle, through_torch_save])
@pytest.mark.parametrize("backend", ["x86", "fbgemm", "qnnpack", "onednn"])
def test_whole_models(way, backend: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = bq.quantize(Model(), x, backend=backend, calibration=[x])
    again = way(model)
    assert torch.equal(again(x), model(x))
    assert [n.name for n in again.graph_module.graph.nodes] == [
        n.name for n in model.graph_module.graph.nodes
    ]
    assert (again.plan, again.kernels, again.engine) == (model.plan, model.kernels, model.engine)
    assert (again.report, again.backend_config) == (model.report, model.backend_config)
    assert not again.training
    assert again.extra_repr() == model.extra_repr()


def test_standalone_modules() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)), torch.randn(3, 4)
    custom = bq.PrepareCustomConfig().set_standalone_module_name("0", None, ())
    quantized = bq.quantize(model, x, calibration=[x], prepare_custom_config=custom)
    assert torch.equal(through_pickle(quantized)(x), quantized(x))


def test_what_cannot_be_stored_is_an_error_with_the_way_out() -> None:
    entry = bq.BackendPatternConfig(nn.Linear).set_root_module(nn.Linear)
    entry.set_reference_quantized_module(bq.nn.quantized.reference.Linear)
    entry.add_dtype_config(bq.DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float))
    fused = bq.BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(
        lambda is_qat, linear, relu: bq.nn.intrinsic.LinearReLU(linear, relu)
    )
    backend = bq.BackendConfig("mine").set_backend_pattern_configs([entry, fused])
    x = torch.randn(3, 4)
    model = bq.quantize(nn.Sequential(nn.Linear(4, 2)), x, backend=backend, calibration=[x])
    with pytest.raises(ArtifactError, match=r"backquant\.save") as caught:
        pickle.dumps(model)
    assert "lambda" in caught.value.what
