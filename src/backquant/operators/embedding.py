"""Embeddings: only the table is quantized, one row at a time; the input is indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.nn import qat
from backquant.nn.quantized import reference
from backquant.operators.entry import admit, functional, swapped
from backquant.operators.example import INPUT, Sample, Weight
from backquant.operators.operator import Operator

__all__ = ["OPERATORS", "bag_entries", "entries", "functional_entries", "table_entries"]


def entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """The two modules and their QAT forms.

    >>> len(entries([DTypeConfig(weight_dtype=torch.quint8)]))
    4
    """
    return [*table_entries(dtype_configs), *bag_entries(dtype_configs)]


def table_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``Embedding``: one row per index.

    >>> [e.pattern.__name__ for e in table_entries([DTypeConfig()])]
    ['Embedding', 'Embedding']
    """
    rows = [
        swapped(nn.Embedding, nn.Embedding, reference.Embedding).set_qat_module(qat.Embedding),
        swapped(qat.Embedding, nn.Embedding, reference.Embedding),
    ]
    return admit(rows, dtype_configs)


def bag_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``EmbeddingBag``: the sum or mean of the rows of a bag of indices.

    >>> [e.pattern.__name__ for e in bag_entries([DTypeConfig()])]
    ['EmbeddingBag', 'EmbeddingBag']
    """
    bag, ref = nn.EmbeddingBag, reference.EmbeddingBag
    rows = [
        swapped(bag, bag, ref).set_qat_module(qat.EmbeddingBag),
        swapped(qat.EmbeddingBag, bag, ref),
    ]
    return admit(rows, dtype_configs)


def functional_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``F.embedding(indices, weight)``.

    >>> functional_entries([DTypeConfig()])[0]._input_type_to_index
    {'weight': 1}
    """
    return admit([functional(F.embedding, weight=1)], dtype_configs)


_TABLE = Weight((10, 6))

OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="embedding",
        family="embedding",
        sample=Sample(
            ((3, 5),), module_args=(10, 6), call=(INPUT, _TABLE), aten=(_TABLE, INPUT), integers=10
        ),
        modules=(nn.Embedding,),
        functions=(F.embedding,),
        aten=(torch.ops.aten.embedding.default,),
        weight_index=1,
        aten_weight_index=0,
        weight_channel_axis=0,
        reference=reference.Embedding,
        qat=qat.Embedding,
    ),
    Operator(
        name="embedding_bag",
        family="embedding",
        sample=Sample(((3, 5),), module_args=(10, 6), call=(INPUT, _TABLE), integers=10),
        modules=(nn.EmbeddingBag,),
        functions=(F.embedding_bag,),
        weight_index=1,
        weight_channel_axis=0,
        reference=reference.EmbeddingBag,
        qat=qat.EmbeddingBag,
    ),
)
