from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import backquant
from backquant import UsageError
from backquant.observe import get_observer_state_dict, load_observer_state_dict


def prepared(seed: int = 0, mapping: backquant.QConfigMapping | None = None) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    mapping = mapping or backquant.get_default_qconfig_mapping("x86")
    return backquant.prepare_fx(model, mapping, torch.zeros(1, 4))


def test_what_was_measured_goes_into_a_new_model() -> None:
    x = torch.randn(32, 4)
    measured = prepared()
    measured(x)
    file = io.BytesIO()
    torch.save(get_observer_state_dict(measured), file)
    file.seek(0)
    fresh = prepared()
    load_observer_state_dict(fresh, torch.load(file, weights_only=True))
    assert torch.equal(backquant.convert_fx(fresh)(x), backquant.convert_fx(measured)(x))


def test_weights_are_neither_taken_nor_changed() -> None:
    measured, other = prepared(), prepared(seed=1)
    measured(torch.randn(32, 4))
    state = get_observer_state_dict(measured)
    before = {key: value.clone() for key, value in other.named_parameters()}
    assert len(before) == 4
    assert not before.keys() & state.keys()
    load_observer_state_dict(other, state)
    assert all(torch.equal(before[key], value) for key, value in other.named_parameters())


def test_training_has_fake_quantizers_of_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    trained = backquant.prepare_qat_fx(model, mapping, torch.zeros(1, 4))
    trained(torch.randn(8, 4))
    state = get_observer_state_dict(trained)
    assert any(key.startswith("0.weight_fake_quant.") for key in state)
    again = backquant.prepare_qat_fx(model, mapping, torch.zeros(1, 4))
    load_observer_state_dict(again, state)
    assert all(torch.equal(state[k], v) for k, v in get_observer_state_dict(again).items())


def test_the_state_of_another_model_is_refused_whole() -> None:
    measured, other = prepared(), prepared()
    measured(torch.randn(32, 4))
    state = get_observer_state_dict(measured)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    missing = dict(list(state.items())[1:])
    with pytest.raises(UsageError, match="lacks"):
        load_observer_state_dict(other, missing)
    with pytest.raises(UsageError, match=r"entries of no observer: weight"):
        load_observer_state_dict(other, {**state, "weight": torch.zeros(4, 4)})
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())


def test_a_model_without_observers() -> None:
    assert not get_observer_state_dict(nn.Linear(1, 1))
