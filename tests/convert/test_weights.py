"""Weighted modules: who is replaced, who shares, who stays float."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference
from backquant.errors import ConfigError
from backquant.nn.intrinsic import ConvReLU2d
from backquant.nn.quantized import reference as nnqr
from backquant.observe import MinMaxObserver, PerChannelMinMaxObserver
from backquant.qconfig import QConfig

ACTIVATION = MinMaxObserver.with_args(reduce_range=True)


def _convert(flow, model, x, mapping=None, **options):
    prepared = flow.prepare(model, mapping)
    calibrate(prepared, [x])
    return convert_to_reference(prepared, **options)


def _called(converted, kind):
    nodes = [n for n in converted.graph.nodes if n.op == "call_module"]
    return [n for n in nodes if isinstance(converted.get_submodule(n.target), kind)]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(torch.sin(self.fc(x)))


def test_a_module_called_twice_is_converted_once(flow):
    converted = _convert(flow, Twice().eval(), torch.randn(3, 4))
    first, second = _called(converted, nnqr.Linear)
    assert first.target == second.target == "fc"
    assert [n for n, _ in converted.named_modules() if n] == ["fc"]


def test_float_calls_of_a_shared_module_keep_the_float_weight(flow):
    """PyTorch quantizes the weight of both calls."""
    model, x = Twice().eval(), torch.randn(3, 4)
    mapping = flow.mapping().set_module_name_object_type_order("", nn.Linear, 1, None)
    converted = _convert(flow, model, x, mapping)
    assert [n.target for n in _called(converted, nnqr.Linear)] == ["fc_quantized"]
    calls = _called(converted, nn.Linear)
    [in_float] = [n for n in calls if n.target != "fc_quantized"]
    assert torch.equal(converted.get_submodule(in_float.target).weight, model.fc.weight)


def test_calls_that_ask_for_other_observers_get_modules_of_their_own(flow):
    model, x = Twice().eval(), torch.randn(3, 4)
    per_tensor = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    mapping = flow.mapping().set_module_name_object_type_order(
        "", nn.Linear, 1, QConfig(ACTIVATION, per_tensor)
    )
    converted = _convert(flow, model, x, mapping)
    targets = [n.target for n in _called(converted, nnqr.Linear)]
    assert targets == ["fc", "fc_quantized"]
    assert converted.fc.weight_scale.shape == (4,)
    assert converted.fc_quantized.weight_scale.shape == ()


def test_fused_modules_keep_their_activation(flow):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    converted = _convert(flow, model, torch.randn(2, 3, 4, 4))
    fused = converted.get_submodule("0")
    assert isinstance(fused, ConvReLU2d)
    assert list(fused._modules) == ["0", "1"]
    assert isinstance(fused[0], nnqr.Conv2d)
    assert isinstance(fused[1], nn.ReLU)


def test_tied_weights_share_their_integers(flow):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.third = nn.Linear(4, 4)

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    converted = _convert(flow, Tied().eval(), torch.randn(3, 4))
    assert converted.second.weight is converted.first.weight
    assert converted.third.weight is not converted.first.weight
    assert converted.second.bias is None


def test_neither_model_nor_prepared_change(flow):
    model, x = Twice().eval(), torch.randn(3, 4)
    parameters = copy.deepcopy(model.state_dict())
    prepared = flow.prepare(model)
    calibrate(prepared, [x])
    state, code = copy.deepcopy(prepared.state_dict()), prepared.code
    first = convert_to_reference(prepared)
    second = convert_to_reference(prepared, dialect="quantized_tensor")
    assert prepared.code == code
    assert all(torch.equal(prepared.state_dict()[k], v) for k, v in state.items())
    assert all(torch.equal(model.state_dict()[k], v) for k, v in parameters.items())
    assert type(prepared.fc) is type(model.fc) is nn.Linear
    with torch.no_grad():
        assert torch.equal(first(x), second(x))
    calibrate(prepared, [100 * x])
    assert convert_to_reference(prepared).code != first.code


def test_weights_are_observed_once_with_their_own_observer(flow):
    seen = []

    class Counting(PerChannelMinMaxObserver):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return super().forward(x)

    weight = Counting.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    mapping = flow.mapping().set_object_type(nn.Linear, QConfig(ACTIVATION, weight))
    _convert(flow, nn.Sequential(nn.Linear(4, 3)).eval(), torch.randn(2, 4), mapping)
    assert seen == [(3, 4)]


def test_a_reference_class_without_from_float_is_refused(flow):
    from backquant.backend_config import get_x86_backend_config

    class Broken(nn.Module):
        pass

    backend = get_x86_backend_config()
    for entry in backend.configs:
        if entry.root_module is nn.Linear:
            entry.set_reference_quantized_module(Broken)
    prepared = flow.prepare(nn.Sequential(nn.Linear(4, 4)).eval(), backend=backend)
    calibrate(prepared, [torch.randn(2, 4)])
    with pytest.raises(ConfigError, match="Broken has no from_float") as error:
        convert_to_reference(prepared)
    setter = "BackendPatternConfig.set_reference_quantized_module(Broken)"
    assert error.value.where == f"{setter}, module '0'"


def test_a_reference_class_whose_from_float_raises(flow):
    """What a user's class raises is no defect of a step of ours."""
    from backquant.backend_config import get_x86_backend_config

    class Failing(nn.Module):
        @classmethod
        def from_float(cls, module, weight_qparams):
            return {}["weight"]

    backend = get_x86_backend_config()
    for entry in backend.configs:
        if entry.root_module is nn.Linear:
            entry.set_reference_quantized_module(Failing)
    prepared = flow.prepare(nn.Sequential(nn.Linear(4, 4)).eval(), backend=backend)
    calibrate(prepared, [torch.randn(2, 4)])
    with pytest.raises(
        ConfigError, match=r"Failing\.from_float raised KeyError: 'weight'"
    ) as error:
        convert_to_reference(prepared)
    assert error.value.where.endswith("set_reference_quantized_module(Failing), module '0'")


def test_the_training_flags_stay(flow):
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout())

        def forward(self, x):
            return self.block(x)

    converted = _convert(flow, Dropped().eval(), torch.randn(2, 4))
    assert not any(module.training for module in converted.modules())


def test_no_observer_is_left(flow):
    model, batches = flow.model("dense")
    converted = _convert(flow, model, batches[0])
    assert not [
        n for n, _ in converted.named_modules(remove_duplicate=False) if "post_process" in n
    ]
    assert not [n for n in converted.state_dict() if "post_process" in n]
