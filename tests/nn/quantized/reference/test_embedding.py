"""Reference embeddings against ``torch.ao``'s."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as oracle
from torch import nn

from backquant.nn.quantized import reference

KINDS = ["float_qparams", "float_qparams_4bit", "per_tensor_affine"]
BAGS: list[dict[str, Any]] = [
    {},
    {"mode": "sum", "include_last_offset": True},
    {"mode": "max", "padding_idx": 2},
    {"max_norm": 1.0, "norm_type": 1.0},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"max_norm": 0.5}])
def test_embedding_is_bit_equal(kind: str, options: dict[str, Any], qparams: Any) -> None:
    embedding = nn.Embedding(12, 8, **options)
    asked = qparams(embedding.weight, kind)
    ours = reference.Embedding.from_float(embedding, asked)
    theirs = oracle.Embedding.from_float(embedding, asked)
    indices = torch.randint(12, (3, 4))
    assert torch.equal(ours(indices), theirs(indices))
    assert ours.weight.dtype == torch.uint8
    assert ours.weight.shape == (12, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", BAGS)
def test_bag_is_bit_equal(kind: str, options: dict[str, Any], qparams: Any) -> None:
    bag = nn.EmbeddingBag(12, 8, **options)
    asked = qparams(bag.weight, kind)
    ours = reference.EmbeddingBag.from_float(bag, asked)
    theirs = oracle.EmbeddingBag.from_float(bag, asked)
    indices, offsets = torch.randint(12, (9,)), torch.tensor([0, 4, 9])
    assert torch.equal(ours(indices, offsets), theirs(indices, offsets))
    if options.get("mode") == "sum":
        weights = torch.rand(9)
        assert torch.equal(ours(indices, offsets, weights), theirs(indices, offsets, weights))


def test_max_norm_leaves_the_integers_alone(qparams: Any) -> None:
    embedding = nn.Embedding(12, 8, max_norm=0.1)
    ours = reference.Embedding.from_float(embedding, qparams(embedding.weight, "float_qparams"))
    before = ours.weight.clone()
    first = ours(torch.arange(12))
    assert torch.equal(ours.weight, before)
    assert torch.equal(ours(torch.arange(12)), first)


def test_float_module_shares_nothing(qparams: Any) -> None:
    embedding = nn.Embedding(4, 2)
    asked = qparams(embedding.weight, "float_qparams_4bit")
    ours = reference.Embedding.from_float(embedding, asked, use_precomputed_fake_quant=False)
    pointers = {p.untyped_storage().data_ptr() for p in embedding.parameters()}
    assert pointers.isdisjoint(b.untyped_storage().data_ptr() for b in ours.buffers())
    assert int(ours.weight.max()) <= 15
