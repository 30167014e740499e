"""Embeddings with integer tables of 8 or 4 bits: torch's row-wise kernels, the same on every engine."""

from __future__ import annotations

from typing import Any

import torch

from backquant.dtypes import dtype_name
from backquant.lower.kernels.embedding import (
    EmbeddingConfig,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    rowwise_table,
)
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Embedding, EmbeddingBag
from backquant.reason_codes import ReasonCode


def embedding_rules() -> list[LowerRule]:
    """Rules for single rows and for bags.

    >>> [rule.name for rule in embedding_rules()]
    ['embedding', 'embedding bag']
    """
    return [
        LowerRule("embedding", ((Embedding,),), _embedding),
        LowerRule("embedding bag", ((EmbeddingBag,),), _bag),
    ]


def _embedding(site: Site) -> Emit | Reason:
    module: Any = site.module
    refused = _check(site, module)
    if refused:
        return refused
    kernel = QuantizedEmbedding(
        EmbeddingConfig(_bits(module), module.embedding_dim), _table(module)
    )
    return _emit(site, kernel)


def _bag(site: Site) -> Emit | Reason:
    module: Any = site.module
    refused = _check(site, module) or _check_bag(site, module)
    if refused:
        return refused
    config = EmbeddingConfig(
        _bits(module), module.embedding_dim, module.mode, bool(module.include_last_offset)
    )
    return _emit(site, QuantizedEmbeddingBag(config, _table(module)))


def _emit(site: Site, kernel: QuantizedEmbedding | QuantizedEmbeddingBag) -> Emit:
    return Emit(kernel, site.node.args, kernel.name, None, site.node.kwargs)


def _check(site: Site, module: Any) -> Reason | None:
    if module.weight.dtype != torch.uint8:
        asked = dtype_name(module.weight_dtype)
        return site.refuse(ReasonCode.WEIGHT_DTYPE, asked, "quint8 or quint4x2", fix=_fix())
    if module.weight_scale.dim() > 1:
        asked, admitted = "scales of groups or blocks", "one scale per row (axis 0)"
        return site.refuse(ReasonCode.WEIGHT_GRANULARITY, asked, admitted, fix=_fix())
    if module.weight_scale.numel() > 1 and module.weight_axis != 0:
        asked = f"scales along axis {module.weight_axis}"
        return site.refuse(ReasonCode.WEIGHT_AXIS, asked, "one scale per row (axis 0)", fix=_fix())
    if module.max_norm is not None:
        return site.refuse(ReasonCode.MAX_NORM, f"max_norm={module.max_norm}", "max_norm=None")
    return _check_half_scale(site, module) if _bits(module) == 4 else None


def _check_half_scale(site: Site, module: Any) -> Reason | None:
    """With 4 bits, scale and bias of a row are stored in float16."""
    scale, zero_point = module.weight_scale, module.weight_zero_point
    half, bias = scale.half(), (scale * zero_point).half()
    if bool((half > 0).all() and half.isfinite().all() and bias.isfinite().all()):
        return None
    asked = f"scales from {scale.min().item():g} to {scale.max().item():g}"
    return site.refuse(ReasonCode.SCALE, asked, "scales that float16 can hold", fix="8 bits")


def _check_bag(site: Site, module: Any) -> Reason | None:
    if module.mode == "max":
        return site.refuse(ReasonCode.MODE, "mode='max'", "mode='sum' or 'mean'")
    if module.padding_idx is not None:
        return site.refuse(
            ReasonCode.PADDING_IDX, f"padding_idx={module.padding_idx}", "padding_idx=None"
        )
    return None


def _bits(module: Any) -> int:
    return 4 if module.weight_dtype == torch.quint4x2 else 8


def _table(module: Any) -> torch.Tensor:
    rows = module.weight.shape[0]
    scale, zero_point = module.weight_scale, module.weight_zero_point
    return rowwise_table(module.weight, scale.expand(rows), zero_point.expand(rows), _bits(module))


def _fix() -> str:
    return "qconfig_mapping.set_object_type(torch.nn.Embedding, float_qparams_weight_only_qconfig)"
