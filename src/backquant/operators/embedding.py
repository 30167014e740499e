"""Embeddings: only the table is quantized, one row at a time; the input is indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.graph.export import Call
from backquant.nn import qat
from backquant.nn.quantized import reference
from backquant.operators.entry import admit, filled, function_call, functional, swapped
from backquant.operators.operator import INPUT, Operator, Sample, Weight


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


def frozen_table_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``Embedding``, not in training, where tables are quantized with float zero points only.

    >>> [e.pattern.__name__ for e in frozen_table_entries([DTypeConfig()])]
    ['Embedding']
    """
    return admit([swapped(nn.Embedding, nn.Embedding, reference.Embedding)], dtype_configs)


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


_aten = torch.ops.aten
_TABLE = Weight((10, 6))
_SUM, _MEAN = 0, 1


def _sums_of_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,  # noqa: ARG001  training only
    mode: int = _SUM,
    sparse: bool = False,  # noqa: ARG001  training only
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``aten::embedding_bag`` as a gather and sums by bag; its last result, for training, is missing."""
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    starts = offsets[:-1] if include_last_offset else offsets
    begun = torch.zeros(indices.shape[0] + 1, dtype=torch.int64)
    begun = begun.scatter_add(0, starts.long(), torch.ones_like(starts).long())
    bag = begun.cumsum(0)[:-1] - 1
    counted = torch.ones_like(bag)
    if padding_idx is not None and padding_idx >= 0:
        counted = (indices != padding_idx).long()
    sizes = torch.zeros_like(starts).long().scatter_add(0, bag, counted)
    target = bag.unsqueeze(1).expand_as(rows)
    empty = weight.new_zeros((starts.shape[0], weight.shape[1]))
    is_counted = counted.to(rows.dtype).unsqueeze(1)
    if mode in (_SUM, _MEAN):
        out = empty.scatter_add(0, target, rows * is_counted)
        if mode == _MEAN:
            out = out / sizes.clamp(min=1).to(out.dtype).unsqueeze(1)
    else:
        least = torch.finfo(rows.dtype).min
        lowered = torch.where(is_counted > 0, rows, least)
        out = (empty + least).scatter_reduce(0, target, lowered, "amax")
        out = torch.where(sizes.unsqueeze(1) > 0, out, 0.0)
    return out, bag, sizes, bag


def _call(weight: Any, indices: Any, padding_idx: int = -1, *_: Any) -> Call:
    if padding_idx < 0:
        return function_call(F.embedding, indices, weight)
    return function_call(F.embedding, indices, weight, padding_idx)


def _module(weight: Any, _: Any, padding_idx: int = -1, *__: Any) -> nn.Module | None:
    if not isinstance(weight, torch.Tensor):
        return None
    padding = None if padding_idx < 0 else padding_idx
    made = nn.Embedding(weight.shape[0], weight.shape[1], padding, device="meta")
    return filled(made, weight=weight)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="embedding",
        family="embedding",
        sample=Sample(
            ((3, 5),), module_args=(10, 6), call=(INPUT, _TABLE), aten=(_TABLE, INPUT), integers=10
        ),
        modules=(nn.Embedding,),
        functions=(F.embedding,),
        aten=(_aten.embedding.default,),
        weight_index=1,
        aten_weight_index=0,
        weight_channel_axis=0,
        reference=reference.Embedding,
        qat=qat.Embedding,
        respelled={_aten.embedding.default: _call},
        rebuilt={_aten.embedding.default: _module},
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
        portable=dict.fromkeys(
            (
                _aten.embedding_bag.default,
                _aten.embedding_bag.padding_idx,
                _aten._embedding_bag.default,
                _aten._embedding_bag_forward_only.default,
            ),
            _sums_of_bags,
        ),
    ),
)
