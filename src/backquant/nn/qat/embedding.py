"""Embeddings whose weight is fake-quantized while they train."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.qat.weight_fake_quantizer import QATModule


class _QATEmbeddingBase(QATModule):
    """The arguments of the float module, then ``qconfig`` by keyword.

    Raises ``ConfigError`` for a ``qconfig`` whose weight has another scheme than float qparams per channel;
    weights in groups of a row have any, and are trained as floats.
    """

    __constants__: ClassVar[list[str]]  # of PyTorch: the arguments of the float module

    def __init__(self, *args: Any, qconfig: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attach(qconfig)
        qscheme = getattr(self.weight_fake_quant, "qscheme", None)
        in_groups = getattr(self.weight_fake_quant, "granularity", "")
        if qscheme != torch.per_channel_affine_float_qparams and not in_groups:
            raise ConfigError(
                f"qat.{type(self).__name__} needs a weight with "
                f"torch.per_channel_affine_float_qparams, got {qscheme}",
                where=f"qat.{type(self).__name__}(..., qconfig=...)",
                fix="qconfig=backquant.QConfig(activation=backquant.NoopObserver, "
                "weight=backquant.observe.default_embedding_fake_quant)",
            )

    @classmethod
    def _arguments_of(cls, root: nn.Module) -> dict[str, Any]:
        return {name: getattr(root, name) for name in cls.__constants__}


class Embedding(_QATEmbeddingBase, nn.Embedding):
    """``torch.nn.Embedding`` with ``weight_fake_quant`` from ``qconfig.weight``.

    >>> from types import SimpleNamespace
    >>> class Weight(nn.Identity):
    ...     qscheme = torch.per_channel_affine_float_qparams
    >>> Embedding(4, 2, qconfig=SimpleNamespace(weight=Weight))(torch.tensor([1, 3])).shape
    torch.Size([2, 2])
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = nn.Embedding
    _ROOT = nn.Embedding

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
    _ROOT = nn.EmbeddingBag

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
