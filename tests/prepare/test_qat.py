"""The swap for training, and a short training run against PyTorch's."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.ao.quantization as tq
from torch import nn
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config as torch_x86
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_qat_fx

import backquant.nn.qat as nnqat
import backquant.qconfig as bq
from backquant.backend_config import get_x86_backend_config
from backquant.convert import convert_to_reference
from backquant.errors import ConfigError
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import make_plan, plan_fusion
from backquant.nn.intrinsic import qat as nniqat
from backquant.prepare import Record, insert_observers, prepared_state, swap_for_training


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.again = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.relu(self.bn(self.conv(x)))
        return self.fc((self.again(x) + x).mean([2, 3]))


def _prepare(model, mapping=None, backend=None):
    backend = backend or get_x86_backend_config()
    mapping = mapping or bq.get_default_qat_qconfig_mapping("x86")
    captured = capture(model)
    fusions = plan_fusion(captured.module, backend)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, True)
    planned = make_plan(fused.module, fused.scopes, backend, mapping, fusions=fusions)
    swapped = swap_for_training(fused.module, planned, backend, mapping)
    return insert_observers(
        swapped, Record(planned, backend, mapping, scopes=fused.scopes, provenance=fused.provenance)
    )


def _torch_prepare(model, x):
    mapping = tq.get_default_qat_qconfig_mapping("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare_qat_fx(copy.deepcopy(model), mapping, (x,), backend_config=torch_x86())


def _train(model, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    outputs = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        result = model(torch.randn(4, 3, 6, 6, generator=generator))
        optimizer.zero_grad()
        result.square().mean().backward()
        optimizer.step()
        outputs.append(result.detach())
    return outputs


def test_training_equals_torch(flow):
    model, x = Net().train(), torch.randn(4, 3, 6, 6)
    theirs, ours = _torch_prepare(model, x), _prepare(model)
    assert ours.code == theirs.code
    assert flow.observers(ours) == flow.observers(theirs)
    for one, two in zip(_train(ours), _train(theirs), strict=True):
        assert torch.equal(one, two)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = convert_to_reference_fx(theirs.eval(), backend_config=torch_x86())
    converted = convert_to_reference(ours.eval(), dialect="quantized_tensor")
    assert converted.code == expected.code
    with torch.no_grad():
        assert torch.equal(converted(x), expected(x))


def test_modules_are_swapped_and_the_model_is_not(flow):
    model = Net().train()
    before = copy.deepcopy(model.state_dict())
    prepared = _prepare(model)
    assert isinstance(prepared.conv, nniqat.ConvBnReLU2d)
    assert isinstance(prepared.again, nnqat.Conv2d)
    assert isinstance(prepared.fc, nnqat.Linear)
    _train(prepared, steps=2)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert type(model.fc) is nn.Linear
    assert not hasattr(model.fc, "qconfig")


def test_skipped_modules_stay_float():
    mapping = bq.get_default_qat_qconfig_mapping("x86").set_module_name("fc", None)
    prepared = _prepare(Net().train(), mapping)
    assert type(prepared.fc) is nn.Linear


def test_prepared_for_training_pickles():
    prepared = _prepare(Net().train())
    _train(prepared, steps=2)
    again = pickle.loads(pickle.dumps(prepared))
    assert prepared_state(again).sites == prepared_state(prepared).sites
    for one, two in zip(_train(prepared, 2), _train(again, 2), strict=True):
        assert torch.equal(one, two)


def test_converted_weights_are_integers():
    prepared = _prepare(Net().train())
    _train(prepared, steps=3)
    converted = convert_to_reference(prepared.eval())
    assert converted.get_submodule("conv.0").weight.dtype == torch.int8
    assert not [n for n, _ in converted.named_modules() if "fake_quant" in n]


def test_a_qat_class_without_from_float_is_refused():
    class Broken(nn.Linear):
        from_float = None

    backend = get_x86_backend_config()
    for entry in backend.configs:
        if entry.normal_pattern.size == 1 and entry.normal_pattern.anchor.op is nn.Linear:
            entry.set_qat_module(Broken)
    with pytest.raises(ConfigError, match="Broken has no from_float"):
        _prepare(Net().train(), backend=backend)


def test_a_qat_class_whose_from_float_raises():
    class Failing(nn.Linear):
        @classmethod
        def from_float(cls, module):
            return {}["weight"]

    backend = get_x86_backend_config()
    for entry in backend.configs:
        if entry.normal_pattern.size == 1 and entry.normal_pattern.anchor.op is nn.Linear:
            entry.set_qat_module(Failing)
    with pytest.raises(
        ConfigError, match=r"Failing\.from_float raised KeyError: 'weight'"
    ) as error:
        _prepare(Net().train(), backend=backend)
    assert "set_qat_module(Failing)" in error.value.where
