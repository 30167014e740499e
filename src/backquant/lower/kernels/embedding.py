"""Embedding tables of 8 and 4 bits, by FBGEMM's row-wise layout on a plain uint8 tensor.

A row is its integers, then its scale and its bias (minus scale times zero point): float32 after 8-bit
integers, float16 after 4-bit ones, of which two share a byte, the first in the lower half.
Source: the operators ``quantized::embedding_bag_{byte,4bit}_rowwise_offsets``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from backquant.errors import InputError
from backquant.lower.kernels.configured import KernelModule, decode_config, lacking

_BITS = (4, 8)
_STORED = ("weight", "weight_scale", "weight_zero_point")


def rowwise_table(
    weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int
) -> torch.Tensor:
    """Rows of integers with the qparams of each behind them.

    Args:
        weight: uint8 ``[rows, columns]``, values below ``2**bits``.
        scale, zero_point: one entry per row.
        bits: 8 or 4; with 4, an odd last column gets a 0 beside it.

    >>> table = rowwise_table(torch.tensor([[1, 2, 3]], dtype=torch.uint8), torch.ones(1), torch.ones(1), 4)
    >>> table
    tensor([[ 33,   3,   0,  60,   0, 188]], dtype=torch.uint8)
    """
    bias = -scale.float() * zero_point.float()
    qparams = torch.stack([scale.float(), bias], 1)
    if bits == 4:
        if weight.shape[1] % 2:
            weight = torch.nn.functional.pad(weight, (0, 1))
        weight = weight[:, 0::2] | (weight[:, 1::2] << 4)
        qparams = qparams.half()
    return torch.cat([weight, qparams.contiguous().view(torch.uint8)], 1)


@dataclass(frozen=True)
class EmbeddingConfig:
    """``bits`` per integer, ``columns`` of the table; ``mode`` (``sum`` or ``mean``) and
    ``include_last_offset`` are for bags."""

    bits: int
    columns: int
    mode: str = "sum"
    include_last_offset: bool = False


class _Table(KernelModule):
    """The buffer ``table`` as ``rowwise_table`` makes it, and how it is read. ``tensors``: what it was made
    of, if that is kept (``weight``, ``weight_scale``, ``weight_zero_point``); files hold them, which
    the reference model has, too, in the table's place."""

    config_class = EmbeddingConfig
    config: EmbeddingConfig
    table: torch.Tensor

    def __init__(
        self,
        config: EmbeddingConfig,
        table: torch.Tensor,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.tensors = config, tensors
        self.register_buffer("table", table.detach())

    @classmethod
    def of(cls, config: EmbeddingConfig, tensors: Mapping[str, Any]) -> Self:
        """The kernel of a weight, with one scale and zero point for all rows, or for each."""
        weight, *numbers = (tensors[name] for name in _STORED)
        scale, zero_point = (number.expand(len(weight)) for number in numbers)
        kept = {name: tensors[name] for name in _STORED}
        return cls(config, rowwise_table(weight, scale, zero_point, config.bits), kept)

    def stored_tensors(self) -> Mapping[str, torch.Tensor | None]:
        return self._buffers if self.tensors is None else self.tensors

    @classmethod
    def from_artifact(
        cls, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]
    ) -> _Table:
        """Build the kernel again from ``artifact_config()`` and its buffer; raises ``ArtifactError``."""
        table, decoded = tensors.get("table"), decode_config(cls.config_class, config)
        if "weight" in tensors:
            return cls.of(decoded, tensors)
        if table is None or table.dtype != torch.uint8 or decoded.bits not in _BITS:
            raise lacking(cls, ["its table of uint8"])
        return cls(decoded, table)

    def _look_up(self, indices: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ops = torch.ops.quantized
        byte, half = ops.embedding_bag_byte_rowwise_offsets, ops.embedding_bag_4bit_rowwise_offsets
        out: torch.Tensor = (byte if self.config.bits == 8 else half)(
            self.table, indices.contiguous(), *arguments
        )
        return out[..., : self.config.columns]


class QuantizedEmbedding(_Table):
    """Rows of an integer table as floats, called like ``nn.Embedding``.

    >>> table = rowwise_table(torch.tensor([[1, 2]], dtype=torch.uint8), torch.ones(1), torch.zeros(1), 8)
    >>> QuantizedEmbedding(EmbeddingConfig(8, 2), table)(torch.tensor([0, 0]))
    tensor([[1., 2.],
            [1., 2.]])
    """

    @property
    def name(self) -> str:
        return f"quantized.embedding_{'byte' if self.config.bits == 8 else '4bit'}"

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Integer indices of any shape to floats with the columns appended."""
        # each index is looked up as a bag of one
        rows = self._look_up(indices.reshape(-1, 1))
        return rows.reshape(*indices.shape, self.config.columns)


class QuantizedEmbeddingBag(_Table):
    """Sums or means of rows, called like ``nn.EmbeddingBag``.

    >>> table = rowwise_table(torch.tensor([[1, 2]], dtype=torch.uint8), torch.ones(1), torch.zeros(1), 8)
    >>> QuantizedEmbeddingBag(EmbeddingConfig(8, 2), table)(torch.tensor([[0, 0]]))
    tensor([[2., 4.]])
    """

    @property
    def name(self) -> str:
        return f"quantized.embedding_bag_{'byte' if self.config.bits == 8 else '4bit'}"

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bags of integer indices to ``(bags, columns)``, as the float module.

        Raises ``InputError`` for weights of samples where the mean is asked for, and ``RuntimeError`` for
        offsets that lead out of the indices.
        """
        last = self.config.include_last_offset
        _check_offsets(indices, offsets)
        if per_sample_weights is not None and self.config.mode != "sum":
            raise InputError(
                "weights of samples are for sums, and this bag takes the mean",
                where=self.name,
                fix="torch.nn.EmbeddingBag(..., mode='sum')",
            )
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
        out = self._look_up(
            indices,
            offsets,
            False,
            0,
            False,
            per_sample_weights,
            None,
            last and offsets is not None,
        )
        if self.config.mode == "sum":
            return out
        return out / _lengths(indices, offsets, last).clamp(min=1).unsqueeze(1)


def _check_offsets(indices: torch.Tensor, offsets: torch.Tensor | None) -> None:
    """The operator reads where they point to. No number is read here, so that a call can be recorded."""
    if offsets is None or not offsets.numel():
        return
    after = torch.cat([offsets[1:], offsets.new_tensor([indices.numel()])])
    torch._assert_async(
        ((offsets >= 0) & (offsets <= after)).all(),
        "the offsets of an embedding bag must rise from 0 up to the number of indices",
    )


def _lengths(indices: torch.Tensor, offsets: torch.Tensor | None, last: bool) -> torch.Tensor:
    """How many indices each bag has."""
    if offsets is None:
        return indices.new_full((indices.shape[0],), indices.shape[1])
    ends = offsets[1:] if last else torch.cat([offsets[1:], offsets.new_tensor([indices.numel()])])
    return ends - (offsets[:-1] if last else offsets)
