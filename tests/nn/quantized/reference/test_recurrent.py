"""Reference LSTM and GRU against ``torch.ao``'s."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as oracle
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from backquant.errors import ConfigError
from backquant.nn.quantized import reference

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bias": False},
    {"num_layers": 3, "dropout": 0.5},
]


def _qparams_dict(module: nn.RNNBase, qparams: Any, kind: str) -> dict[str, Any]:
    names = [name for name in module._flat_weights_names if name.startswith("weight")]
    made = {name: qparams(getattr(module, name), kind) for name in names}
    for one in made.values():  # PyTorch's RNN makes its tensors with torch.tensor(...), which warns
        one["scale"] = torch.as_tensor(one["scale"]).reshape(-1).tolist()
        one["zero_point"] = torch.as_tensor(one["zero_point"]).reshape(-1).tolist()
        if one["qscheme"] == torch.per_tensor_affine:
            one["scale"], one["zero_point"] = one["scale"][0], one["zero_point"][0]
    return {**made, "is_decomposed": False}


def _flat(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [tensor for part in output for tensor in _flat(part)]


@pytest.mark.parametrize("kind", ["per_tensor_symmetric", "per_tensor_affine"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_forward_is_bit_equal(name: str, options: dict[str, Any], kind: str, qparams: Any) -> None:
    module = getattr(nn, name)(5, 7, **options)
    asked = _qparams_dict(module, qparams, kind)
    ours = getattr(reference, name).from_float(module, asked)
    theirs = getattr(oracle, name).from_float(module, asked)
    x = torch.randn(6, 3, 5)
    torch.manual_seed(1)
    one = _flat(ours(x))
    torch.manual_seed(1)
    two = _flat(theirs(x))
    assert len(one) == len(two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_state_packed_and_unbatched_inputs(name: str, qparams: Any) -> None:
    module = getattr(nn, name)(5, 7)
    asked = _qparams_dict(module, qparams, "per_tensor_affine")
    ours = getattr(reference, name).from_float(module, asked)
    theirs = getattr(oracle, name).from_float(module, asked)
    x, h = torch.randn(6, 3, 5), torch.randn(1, 3, 7)
    state = (h, torch.randn(1, 3, 7)) if name == "LSTM" else h
    packed = pack_padded_sequence(x, torch.tensor([6, 4, 2]))
    single = x[:, 0]
    for one, two in [
        (ours(x, state), theirs(x, state)),
        (pad_packed_sequence(ours(packed)[0]), pad_packed_sequence(theirs(packed)[0])),
        (ours(single), theirs(single)),
    ]:
        assert all(torch.equal(a, b) for a, b in zip(_flat(one), _flat(two), strict=True))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projection_is_kept(qparams: Any) -> None:
    """PyTorch's from_float drops proj_size: a difference on purpose."""
    module = nn.LSTM(5, 7, proj_size=3)
    asked = _qparams_dict(module, qparams, "per_channel_symmetric")
    ours = reference.LSTM.from_float(module, asked)
    assert ours.weight_hr_l0.dtype == torch.int8
    for name in ours.weight_names:
        setattr(module, name, nn.Parameter(ours._dequantized(name)))
    x = torch.randn(4, 2, 5)
    assert torch.equal(ours(x)[0], module(x)[0])


def test_per_channel_equals_the_float_module_on_dequantized_weights(qparams: Any) -> None:
    """PyTorch's reference LSTM cannot run per channel: it finds no ``axis``."""
    module = nn.GRU(5, 7, num_layers=2)
    ours = reference.GRU.from_float(module, _qparams_dict(module, qparams, "per_channel_symmetric"))
    for name in ours.weight_names:
        setattr(module, name, nn.Parameter(ours._dequantized(name)))
    x = torch.randn(4, 2, 5)
    assert torch.equal(ours(x)[0], module(x)[0])


def test_float16_weights() -> None:
    module = nn.LSTM(5, 7)
    half = {"qscheme": None, "dtype": torch.float16}
    ours = reference.LSTM.from_float(module, {"weight_ih_l0": half, "weight_hh_l0": half})
    assert ours.weight_ih_l0.dtype == torch.float16
    module.half().float()
    module.bias_ih_l0.data, module.bias_hh_l0.data = ours.bias_ih_l0, ours.bias_hh_l0
    x = torch.randn(4, 2, 5)
    assert torch.equal(ours(x)[0], module(x)[0])


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_copies_and_state_dict(name: str, qparams: Any) -> None:
    module = getattr(nn, name)(5, 7, num_layers=2)
    asked = _qparams_dict(module, qparams, "per_channel_affine")
    ours = getattr(reference, name).from_float(module, asked)
    x = torch.randn(4, 2, 5)
    loaded = getattr(reference, name)(5, 7, num_layers=2)
    loaded.load_state_dict(ours.state_dict())
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), loaded):
        assert torch.equal(twin(x)[0], ours(x)[0])
        assert twin.weight_ih_l1_qscheme == torch.per_channel_affine
    assert all(isinstance(value, torch.Tensor) for value in ours.state_dict().values())


def test_flat_weights_follow_the_integers(qparams: Any) -> None:
    module = nn.LSTM(5, 7)
    ours = reference.LSTM.from_float(module, _qparams_dict(module, qparams, "per_tensor_affine"))
    ours.weight_ih_l0.fill_(121)  # the zero point
    weights = ours.get_flat_weights()
    assert weights[0] is not None and not weights[0].any()
    assert ours.get_quantized_weight_bias_dict()["weight_ih_l0"] is ours.weight_ih_l0


def test_a_missing_weight_is_named(qparams: Any) -> None:
    module = nn.LSTM(5, 7)
    asked = _qparams_dict(module, qparams, "per_tensor_affine")
    del asked["weight_hh_l0"]
    with pytest.raises(ConfigError, match="no qparams for 'weight_hh_l0'"):
        reference.LSTM.from_float(module, asked)
