"""Storage of integer weights: state_dict, copies, devices."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from backquant.nn.quantized import reference

KINDS = ["per_tensor_affine", "per_channel_symmetric", "float_qparams", "float_qparams_4bit"]


def _linear(kind: str, qparams: Any) -> reference.Linear:
    linear = nn.Linear(6, 4)
    return reference.Linear.from_float(linear, qparams(linear.weight, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_loads_into_a_module_with_other_qparams(kind: str, qparams: Any) -> None:
    ours = _linear(kind, qparams)
    state = ours.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    loaded = reference.Linear(6, 4)
    assert loaded.load_state_dict(state).missing_keys == []
    x = torch.randn(3, 6)
    assert torch.equal(loaded(x), ours(x))
    for attribute in ("qscheme", "dtype", "axis", "quant_min", "quant_max"):
        name = f"weight_{attribute}"
        assert getattr(loaded, name) == getattr(ours, name)


def test_state_dict_of_another_shape_is_an_error(qparams: Any) -> None:
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        reference.Linear(7, 4).load_state_dict(_linear("per_tensor_affine", qparams).state_dict())


def test_missing_entries_are_reported(qparams: Any) -> None:
    state = _linear("per_tensor_affine", qparams).state_dict()
    del state["weight_scale"]
    with pytest.raises(RuntimeError, match="weight_scale"):
        reference.Linear(6, 4).load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_copies(kind: str, qparams: Any) -> None:
    ours = _linear(kind, qparams)
    x = torch.randn(3, 6)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(x), ours(x))
        twin.weight.zero_()
    assert ours.weight.any()


def test_weights_only_load(qparams: Any, tmp_path: Any) -> None:
    ours = _linear("per_channel_symmetric", qparams)
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    loaded = reference.Linear(6, 4)
    loaded.load_state_dict(state)
    assert torch.equal(loaded.weight, ours.weight)


def test_half_moves_the_scale_not_the_integers(qparams: Any) -> None:
    ours = _linear("per_channel_symmetric", qparams).bfloat16()
    assert ours.weight.dtype == torch.int8
    assert ours(torch.randn(3, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_building_draws_no_random_numbers(qparams: Any) -> None:
    linear = nn.Linear(6, 4)
    asked = qparams(linear.weight, "per_tensor_affine")
    before = torch.get_rng_state()
    reference.Linear.from_float(linear, asked)
    assert torch.equal(torch.get_rng_state(), before)
