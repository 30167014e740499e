"""What is true of one dtype that values are quantized to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from zlib import crc32

import torch


class Format(Enum):
    """How stored values represent numbers."""

    SIGNED = "signed integers"  # value = (q - zero_point) * scale
    UNSIGNED = "unsigned integers"
    FLOAT = "narrow floats with a scale"  # value = q * scale
    CAST = "narrower floats"  # value = q: no scale, no zero point
    FULL = "floats as they are"


@dataclass(frozen=True)
class QDType:
    """One row of the table of dtypes; ``register_dtype`` adds one.

    * ``token``: the ``torch.dtype`` that configs, descriptions and observers name it by. PyTorch has some
      without any operator, such as ``torch.uint6`` or ``torch.int4``.
    * ``storage``: the plain dtype of the tensors that hold its values.
    * ``bits``: the width of one value; of integers it gives the range.
    * ``tensor_token``: whether PyTorch has quantized tensors of ``token``, which
      ``torch.quantize_per_tensor`` makes (``torch.quint8`` and the like).
    * ``packed``: several values share a byte in PyTorch's kernels, which take weights only.
    * ``symmetric_zero_point``: the zero point of symmetric schemes; None: the middle of the range.
    * ``largest``: the largest value of a narrow float, where it is not that of the storage.
    * ``number``: the number of the dtype in saved modules; None: derived from its name.

    >>> row = QDType(torch.uint6, torch.uint8, 6, Format.UNSIGNED)
    >>> row.low, row.high, row.name, row.middle
    (0, 63, 'uint6', 32)
    """

    token: torch.dtype
    storage: torch.dtype
    bits: int
    format: Format
    tensor_token: bool = False
    packed: bool = False
    symmetric_zero_point: int | None = None
    number: int | None = None
    largest: int | None = None

    @property
    def name(self) -> str:
        """The token without ``torch.``."""
        return str(self.token).removeprefix("torch.")

    @property
    def is_integer(self) -> bool:
        """Whether values are integers, with scale and zero point."""
        return self.format in (Format.SIGNED, Format.UNSIGNED)

    @property
    def is_float(self) -> bool:
        """Whether values are narrow floats that have a scale."""
        return self.format is Format.FLOAT

    @property
    def has_scale(self) -> bool:
        """Whether values are divided by a scale, and not only cast."""
        return self.is_integer or self.is_float

    @property
    def is_stored(self) -> bool:
        """Whether weights are stored in this dtype: all but full floats, which they are already."""
        return self.format is not Format.FULL

    @property
    def is_observed(self) -> bool:
        """Whether activations of this dtype get an observer: stored dtypes other than packed integers."""
        return self.is_stored and (self.is_float or not self.packed)

    @property
    def low(self) -> int:
        """The smallest value that is stored."""
        if not self.is_integer:
            return -self.high
        return -(1 << (self.bits - 1)) if self.format is Format.SIGNED else 0

    @property
    def high(self) -> int:
        """The largest finite value that is stored."""
        if not self.is_integer and self.largest is not None:
            return self.largest
        if not self.is_integer:
            return int(torch.finfo(self.storage).max)
        return (1 << (self.bits - 1)) - 1 if self.format is Format.SIGNED else (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric schemes over the whole range."""
        if self.symmetric_zero_point is not None:
            return self.symmetric_zero_point
        return 1 << (self.bits - 1) if self.format is Format.UNSIGNED else 0

    @property
    def code(self) -> int:
        """``number``, or else one that is derived from the name."""
        return (1 << 32) + crc32(self.name.encode()) if self.number is None else self.number
