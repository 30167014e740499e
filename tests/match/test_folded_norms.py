"""A batch norm is folded only where it normalises the features of the layer before it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_fx as oracle

import backquant
from backquant.errors import InputError


def _norm(channels: int) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(channels)
    for tensor in (norm.running_var, norm.weight):
        nn.init.uniform_(tensor, 0.3, 3)
    for tensor in (norm.running_mean, norm.bias):
        nn.init.normal_(tensor)
    return norm


def _model(root: nn.Module, *rest: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(root, _norm(8), *rest, nn.Linear(8, 4)).eval()


ANOTHER_AXIS = {  # its length is that of the features, so that nothing else says so
    "linear": (lambda: _model(nn.Linear(6, 8), nn.ReLU()), (5, 8, 6)),
    "linear, leaky": (lambda: _model(nn.Linear(6, 8), nn.LeakyReLU()), (5, 8, 6)),
    "conv": (lambda: _model(nn.Conv1d(4, 8, 1)), (4, 8)),
    "transposed": (lambda: _model(nn.ConvTranspose1d(4, 8, 1)), (4, 8)),
}


@pytest.mark.parametrize("backend", ["x86", "onednn"])
@pytest.mark.parametrize("name", ANOTHER_AXIS)
def test_over_another_axis_it_stays(name, backend):
    make, shape = ANOTHER_AXIS[name]
    model, x = make(), torch.randn(shape)
    quantized = backquant.quantize(model, x, backend=backend, calibration=[x], slower="keep")
    wanted = model(x)
    assert (quantized(x) - wanted).norm() < 0.03 * wanted.norm()
    # PyTorch folds it: its float model computes something else before anything is quantized
    if name == "linear":
        theirs = oracle.fuse_fx(model)
        assert (theirs(x) - wanted).abs().max() > 0.5


@pytest.mark.parametrize("name", ANOTHER_AXIS)
def test_in_training_as_well(name):
    make, shape = ANOTHER_AXIS[name]
    model, x = make(), torch.randn(shape)
    mapping = backquant.get_default_qat_qconfig_mapping("onednn")
    prepared = backquant.prepare_qat_fx(model, mapping, x, backend_config="onednn").eval()
    prepared(x)
    wanted = model(x)
    for trained in (prepared, backquant.convert_fx(prepared)):
        assert (trained(x) - wanted).norm() < 0.05 * wanted.norm()


def test_over_features_it_is_folded():
    model, x = _model(nn.Linear(6, 8), nn.ReLU()), torch.randn(5, 6)
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    assert [row.operator for row in quantized.report.rows] == ["Linear", "ReLU", "Linear"]


def test_without_a_known_rank_it_is_folded_and_refuses_others(snapshot):
    """As PyTorch folds it, where nobody showed inputs."""
    model, rows, sequences = _model(nn.Linear(6, 8)), torch.randn(5, 6), torch.randn(5, 8, 6)
    mapping = backquant.default_mapping("x86")
    with pytest.warns(UserWarning, match="shapes are unknown"):
        prepared = backquant.prepare_fx(model, mapping, torch.zeros(1, 7), backend_config="x86")
    fused = (
        backquant.fuse_fx(model),
        backquant.api.fuse_modules(model, ["0", "1"]),
        prepared,
    )
    for module in fused:
        assert torch.allclose(module(rows), model(rows), atol=1e-5)
        with pytest.raises(InputError) as caught:
            module(sequences)
    snapshot("folded_batch_norm", caught.value)
    quantized = backquant.convert_fx(prepared, qconfig_mapping=mapping.set_module_name("0", None))
    assert not any(module._forward_pre_hooks for module in quantized.modules())
    assert prepared.get_submodule("0")._forward_pre_hooks


def _prepared_with_inputs_that_fit(*_: object) -> None:
    model, rows = _model(nn.Linear(6, 8)), torch.randn(5, 8, 6)
    prepared = backquant.prepare_fx(
        model, backquant.default_mapping("x86"), (rows,), backend_config="x86"
    )
    assert torch.allclose(prepared(rows), model(rows), atol=1e-5)


BY_HAND = {"prepare_fx(model, mapping, example_inputs)": _prepared_with_inputs_that_fit}
