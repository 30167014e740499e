"""The reference forms of ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from backquant.nn.quantized.reference.module import ReferenceModule, float_weight

_EmbeddingT = TypeVar("_EmbeddingT", bound="_ReferenceEmbedding")


class _ReferenceEmbedding(ReferenceModule):
    """The arguments of the float module, then ``weight_qparams`` by keyword."""

    __constants__: ClassVar[list[str]]  # of PyTorch: the arguments of the float module

    def __init__(
        self, *args: Any, weight_qparams: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._store_weight(self.weight, weight_qparams)

    @classmethod
    def from_float(
        cls: type[_EmbeddingT],
        mod: nn.Module,
        weight_qparams: Mapping[str, Any],
        use_precomputed_fake_quant: bool = False,  # noqa: ARG003
    ) -> _EmbeddingT:
        """Quantize the weight of ``mod``, which is left as it is and shares nothing.

        ``use_precomputed_fake_quant`` has no effect, as in PyTorch. Raises ``ConfigError`` for
        qparams that do not fit the weight.
        """
        weight = float_weight(mod)
        arguments = {name: getattr(mod, name) for name in cls.__constants__}
        reference = cls(**arguments, device="meta")
        reference._store_weight(weight, weight_qparams)
        reference.train(mod.training)
        return reference


class Embedding(_ReferenceEmbedding, nn.Embedding):
    """``torch.nn.Embedding`` on an integer weight; its arguments, then ``weight_qparams=``.

    >>> qparams = {"qscheme": torch.per_channel_affine_float_qparams, "dtype": torch.quint4x2,
    ...            "scale": torch.full((10,), 0.1), "zero_point": torch.full((10,), 7.5), "axis": 0}
    >>> reference = Embedding.from_float(nn.Embedding(10, 4), qparams)
    >>> reference.weight.dtype, int(reference.weight.max()) <= 15
    (torch.uint8, True)
    >>> reference(torch.tensor([1, 2])).shape
    torch.Size([2, 4])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Integer indices of any shape to floats with ``embedding_dim`` appended."""
        return F.embedding(
            input,
            self.dequantized_weight(),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class EmbeddingBag(_ReferenceEmbedding, nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag`` on an integer weight; its arguments, then ``weight_qparams=``.

    >>> EmbeddingBag(10, 4)(torch.tensor([[1, 2], [3, 3]])).shape
    torch.Size([2, 4])
    """

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bags of integer indices to ``(bags, embedding_dim)``, as the float module."""
        return F.embedding_bag(
            input,
            self.dequantized_weight(),
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
