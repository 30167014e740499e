from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import backquant as bq
from backquant.runtime.unchanged import fingerprint


def quantized(x: torch.Tensor) -> bq.QuantizedModel:
    torch.manual_seed(0)
    return bq.quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), calibration=[x])


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, 4)


def test_weights_and_names_do_not_count(x: torch.Tensor, tmp_path) -> None:
    model = quantized(x)
    assert fingerprint(model.graph_module).dtype == torch.uint8
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        buffer.zero_()
    bq.save(model, tmp_path / "model.bq")
    for twin in (other, quantized(x), bq.load(tmp_path / "model.bq")):
        assert torch.equal(fingerprint(twin.graph_module), fingerprint(model.graph_module))


def test_weights_of_a_file_with_other_qparams_are_taken(x: torch.Tensor, tmp_path: Path) -> None:
    """A model from a file is lowered again, from the reference model that the file has."""
    for name, scale in (("one.bq", 1), ("three.bq", 3)):
        bq.save(quantized(scale * x), tmp_path / name)
    model, other = bq.load(tmp_path / "one.bq"), bq.load(tmp_path / "three.bq")
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    twin = bq.load(tmp_path / "one.bq")
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))
