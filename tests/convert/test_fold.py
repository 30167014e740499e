"""A batch norm that trained by itself is folded as calibration folds it before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import backquant
from backquant.convert import convert_to_reference, reference_state

SHAPE = (2, 3, 5, 5)


def _model(groups=1):
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 6, 3, groups=groups), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1)
    )
    bn = model[1]
    bn.running_mean.normal_(), bn.running_var.uniform_(0.5, 2.0)
    nn.init.uniform_(bn.weight, 0.5, 1.5), nn.init.normal_(bn.bias)
    return model


def _trained(model, mapping=None):
    """Prepared for training, and run in evaluation: the batch norm keeps its statistics."""
    prepared = backquant.prepare_qat_fx(
        model.eval(),
        mapping or backquant.get_default_qat_qconfig_mapping("x86"),
        torch.randn(SHAPE),
        backend_config=backquant.backend_config.get_x86_backend_config(),
    )
    prepared(torch.randn(SHAPE))
    return prepared


@pytest.mark.parametrize("groups", [1, 3])
def test_the_weight_is_that_of_folding_before(groups):
    model = _model(groups)
    if groups == 1:
        converted = convert_to_reference(_trained(model))
        calibrated = backquant.prepare_fx(
            model, backquant.get_default_qconfig_mapping("x86"), torch.randn(SHAPE)
        )
        calibrated(torch.randn(SHAPE))
        expected = convert_to_reference(calibrated)
        for name in ("weight", "weight_scale", "bias"):
            one, two = (getattr(m.get_submodule("0"), name) for m in (converted, expected))
            assert torch.equal(one, two)
    else:
        converted = convert_to_reference(_trained(model))
        folded = backquant.fuse_fx(model.eval()).get_submodule("0")
        step = converted.get_submodule("0").weight_scale.max()
        difference = converted.get_submodule("0").dequantized_weight() - folded.weight
        assert difference.abs().max() <= 0.51 * step
    assert "_1" not in [node.name for node in converted.graph.nodes]
    assert dict(converted.named_modules()).get("1") is None


def test_the_prepared_model_is_not_changed(unchanged):
    prepared = _trained(_model())
    with unchanged(prepared):
        convert_to_reference(prepared)
    assert type(prepared.get_submodule("1")) is nn.BatchNorm2d


def test_training_mode_folds_the_running_statistics():
    prepared = _trained(_model())
    expected = convert_to_reference(prepared)
    trained = convert_to_reference(copy.deepcopy(prepared).train())
    for name in ("weight", "bias"):
        one, two = (getattr(m.get_submodule("0"), name) for m in (trained, expected))
        assert torch.equal(one, two)


def test_origins_are_recorded():
    state = reference_state(convert_to_reference(_trained(_model())))
    assert state.provenance.origins("_0") == ("_0", "_1")


@pytest.mark.parametrize("skipped", ["0", "1"])
def test_a_pair_that_stays_float_is_not_folded(skipped):
    mapping = backquant.get_default_qat_qconfig_mapping("x86").set_module_name(skipped, None)
    converted = convert_to_reference(_trained(_model(), mapping))
    assert type(converted.get_submodule("0")) is nn.ConvTranspose2d
    assert type(converted.get_submodule("1")) is nn.BatchNorm2d


def test_trained_modules_have_folded_already():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    converted = convert_to_reference(_trained(model))
    assert [type(m).__name__ for m in converted.children()] == ["Conv2d"]


class Shared(nn.Module):
    """One transposed convolution with a batch norm behind one of its two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.convt = nn.ConvTranspose2d(3, 3, 1)
        self.bn = nn.BatchNorm2d(3)
        self.bn.running_mean.normal_()

    def forward(self, x):
        return self.convt(torch.sin(self.bn(self.convt(x))))


def test_calls_of_one_module_that_differ_get_modules_of_their_own():
    prepared = _trained(Shared())
    converted = convert_to_reference(prepared)
    calls = [n for n in converted.graph.nodes if n.op == "call_module"]
    paths = [str(n.target) for n in calls if "Transpose" in type(_called(converted, n)).__name__]
    assert len(set(paths)) == 2
    one, two = (converted.get_submodule(path).bias for path in paths)
    assert not torch.equal(one, two)
    x = torch.randn(SHAPE)
    expected = prepared(x)
    assert (convert_to_reference(prepared)(x) - expected).abs().max() < 0.2


def _called(module, node):
    return module.get_submodule(str(node.target))
