"""What depends on the mode follows ``train()`` and ``eval()`` after capture."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.ao.quantization as tq
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.prepare import prepared_state


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return F.dropout(self.fc(x), 0.5, training=self.training)


class Net(nn.Module):
    """Functional dropout in submodules, a number that depends on the mode, one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Dropping(), Dropping())
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = F.dropout(self.body(x), p=0.0, training=True)
        return self.head(x) * (1.0 if self.training else 0.5)


def _prepare(qat, model=None, x=None):
    prepared = qat.ours(model or Net(), torch.randn(4, 6) if x is None else x)
    return prepared.apply(backquant.disable_fake_quant)


def test_evaluation_computes_what_the_model_computes_in_evaluation(qat):
    model, x = Net(), torch.randn(4, 6)
    prepared = _prepare(qat, model, x)
    for mode in (True, False, True, False):
        for each in (model, prepared):
            each.train(mode)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(prepared(x), expected)


def test_torch_keeps_dropping_in_evaluation(qat):
    x = torch.randn(4, 6)
    for make, drops in ((qat.theirs, True), (qat.ours, False)):
        prepared = make(Net(), x)
        prepared(x)
        prepared.apply(backquant.disable_observer).apply(tq.disable_observer).eval()
        assert torch.equal(prepared(x), prepared(x)) is not drops


def test_a_part_can_be_put_into_evaluation(qat):
    model, x = Net(), torch.ones(64, 6)
    prepared = _prepare(qat, model, x)
    prepared.get_submodule("body.0").eval()
    model.body[0].eval()
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(prepared(x), expected)


@pytest.mark.parametrize("training", [True, False])
def test_flags_of_the_model_are_kept(qat, training):
    model = Net().train(training)
    model.body[1].train(not training)
    prepared = _prepare(qat, model)
    assert prepared.training is training
    modes = [m.training for n, m in prepared.get_submodule("body.1").named_modules() if "mode" in n]
    assert modes == [not training]


def test_training_equals_torchs(qat):
    model, x = Net(), torch.randn(4, 6)
    qat.train_both(qat.ours(model, x), qat.theirs(model, x), (4, 6), steps=10)


def test_converted_models_compute_the_evaluation(qat):
    model, x = Net(), torch.randn(4, 6)
    prepared = qat.ours(model, x)
    qat.train(prepared, (4, 6), range(10))
    evaluated = copy.deepcopy(model).eval()
    reference = qat.ours(evaluated, x)
    reference.load_state_dict(prepared.state_dict())
    assert prepared.training
    expected = backquant.convert_to_reference_fx(reference)
    converted = backquant.convert_to_reference_fx(prepared)
    assert torch.equal(converted(x), expected(x))
    assert torch.equal(backquant.convert_fx(prepared)(x), backquant.convert_fx(reference)(x))
    assert "mode_value" not in converted.code


def test_copies_and_pickles_follow_the_mode(qat):
    prepared, x = _prepare(qat), torch.randn(4, 6)
    for again in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(again.eval()(x), prepared.eval()(x))
        again.train(), prepared.train()
        torch.manual_seed(1)
        expected = prepared(x)
        torch.manual_seed(1)
        assert torch.equal(again(x), expected)


def test_mode_values_are_not_observed(qat):
    prepared = qat.ours(Net(), torch.randn(4, 6))
    assert not [s for s in prepared_state(prepared).sites.sites if "mode" in s.value]
    reads = [name for name in prepared.code.split() if "mode_value" in name]
    assert reads


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.aux = nn.Linear(4, 2)

    def forward(self, x):
        x = self.fc(x)
        return (x, self.aux(x)) if self.training else x


@pytest.mark.parametrize("training", [True, False])
def test_a_model_with_two_graphs_keeps_its_own_and_says_so(qat, training):
    model = Auxiliary().train(training)
    mode = "training" if training else "evaluation"
    with pytest.warns(UserWarning, match=f"computes in both modes .* in {mode} mode.*aux"):
        prepared = qat.ours(model, torch.randn(2, 4))
    for other in (True, False):
        assert isinstance(prepared.train(other)(torch.randn(2, 4)), tuple) is training


def test_a_model_that_can_be_traced_in_one_mode_only(qat):
    class OneMode(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) if self.training or x.sum() > 0 else x

    with pytest.warns(UserWarning, match="in training mode: .*cannot be traced"):
        prepared = qat.ours(OneMode(), torch.ones(2, 4))
    assert torch.isfinite(prepared(torch.randn(2, 4))).all()


class DropPath(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        return x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5) * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop = DropPath()

    def forward(self, x):
        return x + self.drop(self.bn(self.conv(x)))


def test_dropped_paths_are_dropped_in_training_only(qat, tmp_path):
    """PyTorch's flow, and ours before, dropped them in evaluation and in what was converted, too."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(8, 4, 6, 6)
    prepared = _prepare(qat, model, x).apply(backquant.disable_observer)
    for mode in (True, False):
        for each in (model, prepared):
            each.train(mode)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.allclose(prepared(x), expected, atol=1e-5)
    prepared.apply(backquant.enable_fake_quant).apply(backquant.enable_observer)
    qat.train(prepared.train(), x.shape, range(10))
    quantized = backquant.convert_fx(prepared.eval())
    assert len(quantized.kernels) >= 4
    wanted = prepared.apply(backquant.disable_observer)(x)
    assert (quantized(x) - wanted).abs().max() <= 0.1 * wanted.abs().max()
    backquant.save(quantized, tmp_path / "model.bq")
    assert torch.equal(backquant.load(tmp_path / "model.bq")(x), quantized(x))
