"""State dicts of converted models: from torch.ao, from us, into models that were converted anew."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.cases import CASES, Pair, pair
from torch import nn

import backquant as bq
from backquant.checkpoint import plain_state, slots_of

_MADE: dict[str, Pair] = {}


@pytest.fixture(params=CASES)
def made(request: pytest.FixtureRequest) -> Pair:
    """Each pair once: converting takes longer than loading."""
    if request.param not in _MADE:
        _MADE[request.param] = pair(CASES[request.param])
    return _MADE[request.param]


def _step(model: bq.QuantizedModel) -> float:
    """The scale of the last activation; 0 where none is quantized."""
    assert model.origin is not None
    scales = [
        s.value.item() for s in slots_of(model.origin.reference) if s.node and "scale" in s.key
    ]
    return scales[-1] if scales else 0.0


def _agrees(ours: bq.QuantizedModel, theirs: nn.Module, batches: list[Any], backend: str) -> None:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = backend
    try:
        for batch in batches:
            expected = theirs(*batch)
            assert (ours(*batch) - expected).abs().max() <= 1.001 * _step(ours) + 1e-6
    finally:
        torch.backends.quantized.engine = before


@pytest.mark.parametrize("calibrated", [False, True])
def test_torchs_state_dict_gives_torchs_model(made: Pair, calibrated: bool) -> None:
    ours = made.ours(calibrated=calibrated)
    result = ours.load_state_dict(made.theirs.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    _agrees(ours, made.theirs, made.batches, made.backend)


def test_torchs_file(made: Pair, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own storages of quantized tensors
        torch.save(made.theirs.state_dict(), tmp_path / "theirs.pt")
    held = any(isinstance(v, torch.ScriptObject) for v in made.theirs.state_dict().values())
    # PyTorch refuses objects of its engines in files that hold weights only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch.load(tmp_path / "theirs.pt", weights_only=not held)
    ours = made.ours(calibrated=False)
    ours.load_state_dict(state)
    _agrees(ours, made.theirs, made.batches, made.backend)


@pytest.mark.parametrize("calibrated", [False, True])
def test_our_state_dict_gives_the_same_bits(made: Pair, calibrated: bool, tmp_path: Path) -> None:
    model = made.ours(calibrated=True)
    torch.save(model.state_dict(), tmp_path / "ours.pt")
    other = made.ours(calibrated=calibrated)
    other.load_state_dict(
        {
            k: torch.zeros_like(v) if v.is_floating_point() and "scale" not in k else v
            for k, v in model.state_dict().items()
        }
    )
    other.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    for batch in made.batches:
        assert torch.equal(other(*batch), model(*batch))
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)


def test_keys_are_torchs(made: Pair) -> None:
    """Up to layers that give floats here, and recurrent ones, whose weights have the float layer's names."""
    ours, theirs = made.ours(calibrated=False).state_dict(), plain_state(made.theirs.state_dict())
    lost = {
        key for key in theirs if key not in ours and "scale" not in key and "zero_point" not in key
    }
    assert not {
        key for key in lost if "_all_weight_values" not in key and "_packed_weight_" not in key
    }
