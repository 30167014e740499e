"""The quantizable LSTM cell."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.quantizable as oracle
from torch import nn

from backquant.errors import ConfigError
from backquant.nn import quantizable


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_float_forward(bias: bool, split: bool) -> None:
    cell = nn.LSTMCell(3, 4, bias=bias)
    params = [cell.weight_ih, cell.weight_hh, *([cell.bias_ih, cell.bias_hh] if bias else [])]
    ours = quantizable.LSTMCell.from_params(*params, split_gates=split)
    theirs = oracle.LSTMCell.from_params(*params, split_gates=split)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x, state = torch.randn(5, 3), (torch.randn(5, 4), torch.randn(5, 4))
    for arguments in [(x,), (x, state)]:
        for one, two, plain in zip(
            ours(*arguments), theirs(*arguments), cell(*arguments), strict=True
        ):
            assert torch.equal(one, two)
            torch.testing.assert_close(one, plain)
    single = ours(x[0])[0]
    torch.testing.assert_close(single, ours(x)[0][0])


@pytest.mark.parametrize("split", [True, False])
def test_state_dict_both_ways(split: bool) -> None:
    ours = quantizable.LSTMCell(3, 4, split_gates=split)
    theirs = oracle.LSTMCell(3, 4, split_gates=split)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3)
    assert torch.equal(ours(x)[0], theirs(x)[0])


def test_from_float_observes(minmax_qconfig: Any) -> None:
    cell = nn.LSTMCell(3, 4).eval()
    cell.qconfig = minmax_qconfig
    ours = quantizable.LSTMCell.from_float(cell)
    x = torch.randn(5, 3)
    torch.testing.assert_close(ours(x)[0], cell(x)[0])
    assert not ours.training
    assert ours.igates.weight is cell.weight_ih
    observer = ours.igates.activation_post_process
    expected = nn.functional.linear(x, cell.weight_ih, cell.bias_ih)
    assert torch.equal(observer.max_val, expected.max().detach())
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(x)[0], ours(x)[0])


def test_splitting_shares_nothing(minmax_qconfig: Any) -> None:
    cell = nn.LSTMCell(3, 4).eval()
    cell.qconfig = minmax_qconfig
    ours = quantizable.LSTMCell.from_float(cell, split_gates=True)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert all(parameter.any() for parameter in cell.parameters())


def test_refusals(minmax_qconfig: Any) -> None:
    with pytest.raises(ConfigError, match="two biases or none"):
        quantizable.LSTMCell.from_params(torch.ones(4, 1), torch.ones(4, 1), torch.ones(4))
    with pytest.raises(ConfigError, match="has no qconfig"):
        quantizable.LSTMCell.from_float(nn.LSTMCell(1, 1))
    with pytest.raises(ConfigError, match=r"takes a torch.nn.LSTMCell, got GRUCell"):
        quantizable.LSTMCell.from_float(nn.GRUCell(1, 1))
