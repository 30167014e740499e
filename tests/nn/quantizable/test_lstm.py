"""The quantizable LSTM, against ``nn.LSTM`` and ``torch.ao``'s."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.quantizable as oracle
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from backquant.errors import ConfigError, InputError
from backquant.nn import quantizable
from backquant.observe import is_fake_quantize

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bias": False},
    {"num_layers": 3, "batch_first": True, "bidirectional": True},
]


def _float(qconfig: Any, **options: Any) -> nn.LSTM:
    lstm = nn.LSTM(3, 4, **options).eval()
    lstm.qconfig = qconfig
    return lstm


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_float_forward(options: dict[str, Any], split: bool, minmax_qconfig: Any) -> None:
    lstm = _float(minmax_qconfig, **options)
    ours = quantizable.LSTM.from_float(lstm, split_gates=split)
    count = lstm.num_layers * (1 + lstm.bidirectional)
    x, state = torch.randn(5, 6, 3), None
    batch = 5 if lstm.batch_first else 6
    for state in (None, (torch.randn(count, batch, 4), torch.randn(count, batch, 4))):
        (one, (h1, c1)), (two, (h2, c2)) = ours(x, state), lstm(x, state)
        for a, b in ((one, two), (h1, h2), (c1, c2)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours(x[0])[0], lstm(x[0])[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours(x[0])[1][0], lstm(x[0])[1][0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS)
def test_observers_measure_what_the_oracles_do(
    options: dict[str, Any], minmax_qconfig: Any
) -> None:
    lstm = _float(minmax_qconfig, **options)
    ours = quantizable.LSTM.from_float(lstm)
    theirs = oracle.LSTM.from_float(lstm)
    for _ in range(2):
        x = torch.randn(5, 6, 3)
        assert torch.equal(ours(x)[0], theirs(x)[0])
    expected = theirs.state_dict()
    assert any(key.endswith("min_val") for key in expected)
    assert list(ours.state_dict()) == list(expected)
    for key, value in ours.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_directly_built_bidirectional_layers() -> None:
    """PyTorch's second layer has the wrong input size."""
    lstm = quantizable.LSTM(3, 4, num_layers=2, bidirectional=True)
    assert lstm(torch.randn(5, 2, 3))[0].shape == (5, 2, 8)


def test_training(own_qat_qconfig: Any) -> None:
    lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
    lstm.qconfig = own_qat_qconfig
    ours = quantizable.LSTM.from_float(lstm)
    assert ours.training
    assert any(is_fake_quantize(module) for module in ours.modules())
    x = torch.randn(5, 2, 3)
    first, second = ours(x)[0], ours(x)[0]
    assert not torch.equal(first, second)  # dropout between layers
    first.sum().backward()
    assert lstm.weight_ih_l0.grad is not None
    assert torch.isfinite(lstm.weight_ih_l0.grad).all() and lstm.weight_ih_l0.grad.any()
    ours.eval()
    lstm.eval()
    assert (ours(x)[0] - lstm(x)[0]).abs().mean() < 0.05


def test_the_given_qconfig_serves_without_one(minmax_qconfig: Any) -> None:
    ours = quantizable.LSTM.from_float(nn.LSTM(3, 4).eval(), minmax_qconfig)
    assert ours.qconfig is minmax_qconfig


def test_copies(minmax_qconfig: Any) -> None:
    ours = quantizable.LSTM.from_float(_float(minmax_qconfig, bidirectional=True))
    x = torch.randn(5, 2, 3)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(x)[0], ours(x)[0])


def test_refusals(minmax_qconfig: Any) -> None:
    with pytest.raises(ConfigError, match="no projections"):
        quantizable.LSTM.from_float(_float(minmax_qconfig, proj_size=2))
    with pytest.raises(ConfigError, match="has no qconfig"):
        quantizable.LSTM.from_float(nn.LSTM(1, 1))
    with pytest.raises(ConfigError, match=r"takes a torch\.nn.LSTM, got GRU"):
        quantizable.LSTM.from_float(nn.GRU(1, 1))
    for dropout in (1.5, True):
        with pytest.raises(ConfigError, match="dropout is a probability"):
            quantizable.LSTM(1, 1, dropout=dropout)
    packed = pack_padded_sequence(torch.randn(4, 2, 3), torch.tensor([4, 2]))
    with pytest.raises(InputError, match="no packed sequence"):
        quantizable.LSTM(3, 4)(packed)
