"""Embeddings in training against ``torch.ao.nn.qat``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.nn.qat as oracle
from torch import nn

import backquant
from backquant.dtypes.table import INT4
from backquant.errors import ConfigError
from backquant.nn import qat
from backquant.observe import BlockMinMaxObserver

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Embedding", {}),
    ("Embedding", {"padding_idx": 2, "scale_grad_by_freq": True}),
    ("EmbeddingBag", {}),
    ("EmbeddingBag", {"mode": "sum", "padding_idx": 1}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_bit_equal_in_training(name: str, options: dict[str, Any], embedding_qconfig: Any) -> None:
    plain = getattr(nn, name)(9, 5, **options)
    plain.qconfig = embedding_qconfig
    ours = getattr(qat, name).from_float(copy.deepcopy(plain))
    theirs = getattr(oracle, name).from_float(plain)
    indices = torch.randint(9, (4, 3))
    for _ in range(4):
        for module in (ours, theirs):
            module.zero_grad()
            module(indices).square().sum().backward()
            with torch.no_grad():
                module.weight -= 0.05 * module.weight.grad
    assert torch.equal(ours(indices), theirs(indices))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert type(ours.to_float()) is getattr(nn, name)
    assert torch.equal(ours.to_float()(indices), theirs.to_float()(indices))
    assert list(ours.to_float().state_dict()) == ["weight"]


def test_the_parameter_itself_is_taken(embedding_qconfig: Any) -> None:
    """PyTorch makes another parameter of the same storage, and weights are no longer tied."""
    plain = nn.Embedding(9, 5)
    plain.qconfig = embedding_qconfig
    assert qat.Embedding.from_float(plain).weight is plain.weight


def test_other_schemes_are_refused(qat_qconfig: Any) -> None:
    plain = nn.Embedding(9, 5)
    plain.qconfig = qat_qconfig
    with pytest.raises(ConfigError, match="per_channel_affine_float_qparams, got"):
        qat.Embedding.from_float(plain)
    with pytest.raises(ConfigError, match=r"qat\.EmbeddingBag needs a weight with"):
        qat.EmbeddingBag(9, 5, qconfig=qat_qconfig)


def test_groups_of_a_row_are_measured_as_they_train() -> None:
    """Nothing rounds in groups in training; the trained table is quantized so."""
    weight = BlockMinMaxObserver.with_args(granularity="per_group(size=4)", dtype=INT4)
    plain = nn.Embedding(9, 8)
    plain.qconfig = backquant.QConfig(activation=backquant.NoopObserver, weight=weight)
    trained = qat.Embedding.from_float(plain)
    assert torch.equal(trained(torch.arange(9)), plain.weight)
    assert trained.weight_fake_quant.calculate_qparams()[0].shape == (9, 2)
