"""Embeddings whose weight is fake-quantized while they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.qat.parts import (
    adopt,
    checked_float_module,
    fresh_float_copy,
    weight_fake_quant_of,
)

_QATEmbedding = TypeVar("_QATEmbedding", bound="_QATEmbeddingBase")


class _QATEmbeddingBase(nn.Module):
    """The arguments of the float module, then ``qconfig`` by keyword."""

    _FLOAT_MODULE: ClassVar[type[nn.Module]]
    _arguments: ClassVar[tuple[str, ...]]
    weight: torch.Tensor
    weight_fake_quant: nn.Module

    def __init__(self, *args: Any, qconfig: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.qconfig = qconfig
        self.weight_fake_quant = weight_fake_quant_of(
            qconfig, f"qat.{type(self).__name__}", self.weight.device
        )
        qscheme = getattr(self.weight_fake_quant, "qscheme", None)
        in_groups = getattr(self.weight_fake_quant, "granularity", "")
        if qscheme != torch.per_channel_affine_float_qparams and not in_groups:
            raise ConfigError(
                f"qat.{type(self).__name__} needs a weight with "
                f"torch.per_channel_affine_float_qparams, got {qscheme}",
                where=f"qat.{type(self).__name__}(..., qconfig=...)",
                fix="qconfig=backquant.QConfig(activation=backquant.NoopObserver, "
                "weight=backquant.default_embedding_fake_quant)",
            )

    @classmethod
    def from_float(
        cls: type[_QATEmbedding],
        mod: nn.Module,
        use_precomputed_fake_quant: bool = False,  # noqa: ARG003
    ) -> _QATEmbedding:
        """The QAT form of ``mod``, which needs a ``qconfig``; it shares the weight of ``mod``.

        Sharing keeps tied weights tied; who wants ``mod`` to stay as it is copies it before.
        ``use_precomputed_fake_quant`` has no effect, as in PyTorch. Raises ``ConfigError`` for a
        module of another type, without ``qconfig``, or whose ``qconfig`` has another scheme
        (weights in groups of a row have any, and are trained as floats).
        """
        float_module = checked_float_module(cls, mod, cls._FLOAT_MODULE)
        arguments = {name: getattr(float_module, name) for name in cls._arguments}
        qat = cls(**arguments, qconfig=float_module.qconfig, device="meta")
        adopt(qat, float_module, mod)
        return qat

    def to_float(self) -> nn.Module:
        """A new float module with a copy of the trained weight."""
        cls = type(self)
        make: Callable[..., nn.Module] = cls._FLOAT_MODULE
        arguments = {name: getattr(self, name) for name in cls._arguments}
        return fresh_float_copy(make(**arguments, device="meta"), self)


class Embedding(_QATEmbeddingBase, nn.Embedding):
    """``torch.nn.Embedding`` with ``weight_fake_quant`` from ``qconfig.weight``.

    >>> from types import SimpleNamespace
    >>> class Weight(nn.Identity):
    ...     qscheme = torch.per_channel_affine_float_qparams
    >>> Embedding(4, 2, qconfig=SimpleNamespace(weight=Weight))(torch.tensor([1, 3])).shape
    torch.Size([2, 2])
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = nn.Embedding
    _arguments = (
        "num_embeddings",
        "embedding_dim",
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
    )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Integer indices of any shape to floats with ``embedding_dim`` appended."""
        return F.embedding(
            input,
            self.weight_fake_quant(self.weight),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class EmbeddingBag(_QATEmbeddingBase, nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag`` with ``weight_fake_quant`` from ``qconfig.weight``.

    >>> from types import SimpleNamespace
    >>> class Weight(nn.Identity):
    ...     qscheme = torch.per_channel_affine_float_qparams
    >>> bag = EmbeddingBag(4, 2, qconfig=SimpleNamespace(weight=Weight))
    >>> bag(torch.tensor([[1, 3], [0, 0]])).shape
    torch.Size([2, 2])
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = nn.EmbeddingBag
    _arguments = (
        "num_embeddings",
        "embedding_dim",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "mode",
        "sparse",
        "include_last_offset",
        "padding_idx",
    )

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bags of integer indices to ``(bags, embedding_dim)``, as the float module."""
        return F.embedding_bag(
            input,
            self.weight_fake_quant(self.weight),
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )
