"""Reference cells against ``torch.ao``'s."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as oracle
from torch import nn

from backquant.errors import ConfigError, InputError
from backquant.nn.quantized import reference

CELLS: list[tuple[str, dict[str, Any]]] = [
    ("RNNCell", {}),
    ("RNNCell", {"nonlinearity": "relu"}),
    ("LSTMCell", {}),
    ("GRUCell", {"bias": False}),
]


def _flat(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(output)


def _qparams_dict(cell: nn.RNNCellBase, qparams: Any, kind: str) -> dict[str, Any]:
    return {
        "weight_ih": qparams(cell.weight_ih, kind),
        "weight_hh": qparams(cell.weight_hh, kind),
        "is_decomposed": False,
    }


@pytest.mark.parametrize("kind", ["per_tensor_affine", "per_channel_symmetric"])
@pytest.mark.parametrize(("name", "options"), CELLS)
def test_forward_is_bit_equal(name: str, options: dict[str, Any], kind: str, qparams: Any) -> None:
    cell = getattr(nn, name)(5, 7, **options)
    asked = _qparams_dict(cell, qparams, kind)
    ours = getattr(reference, name).from_float(cell, asked)
    theirs = getattr(oracle, name).from_float(cell, asked)
    x, h = torch.randn(3, 5), torch.randn(3, 7)
    state = (h, torch.randn(3, 7)) if name == "LSTMCell" else h
    one_state = tuple(part[0] for part in state) if name == "LSTMCell" else h[0]
    for arguments in [(x,), (x, state), (x[0],), (x[0], one_state)]:
        pairs = zip(_flat(ours(*arguments)), _flat(theirs(*arguments)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("name", "options"), CELLS)
def test_state_dict_round_trip(name: str, options: dict[str, Any], qparams: Any) -> None:
    cell = getattr(nn, name)(5, 7, **options)
    asked = _qparams_dict(cell, qparams, "per_channel_symmetric")
    ours = getattr(reference, name).from_float(cell, asked)
    loaded = getattr(reference, name)(5, 7, **options)
    loaded.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5)
    for twin in (loaded, copy.deepcopy(ours)):
        assert all(torch.equal(a, b) for a, b in zip(_flat(twin(x)), _flat(ours(x)), strict=True))
    assert torch.equal(ours.get_quantized_weight_ih(), ours.weight_ih)
    assert torch.equal(ours.get_quantized_weight_hh(), ours.weight_hh)


def test_bad_inputs_are_refused(qparams: Any) -> None:
    cell = nn.RNNCell(5, 7)
    ours = reference.RNNCell.from_float(cell, _qparams_dict(cell, qparams, "per_tensor_affine"))
    with pytest.raises(InputError, match="1 or 2 dimensions, got 3"):
        ours(torch.randn(1, 2, 5))
    ours.nonlinearity = "sine"
    with pytest.raises(ConfigError, match="no nonlinearity 'sine'"):
        ours(torch.randn(2, 5))
