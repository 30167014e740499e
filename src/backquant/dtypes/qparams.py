"""What the integers of one tensor stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import torch
from typing_extensions import TypeVar

from backquant.dtypes.granularity import Granularity
from backquant.dtypes.scheme import is_per_channel
from backquant.dtypes.table import dtype_name, integer_range, storage_dtype

ScaleT = TypeVar("ScaleT", default=float)
ZeroPointT = TypeVar("ZeroPointT", default=int)


@dataclass(frozen=True)
class QParams(Generic[ScaleT, ZeroPointT]):
    """``value = (q - zero_point) * scale``, with ``q`` between ``quant_min`` and ``quant_max``.

    ``scale`` and ``zero_point`` are numbers or tensors: of no dimension, or with one entry per slice along
    ``axis``, or with one entry per block of shape ``block``. They are None if values are only cast, and if
    they are computed at each call (``is_dynamic``; the scale is then at least ``eps``). A dynamic tensor has
    one scale, or with ``per_token`` one for each slice along the last axis, or with ``groups`` one for each
    group or block, stored in ``scale_dtype``. ``dtype`` is a quantized dtype or its storage.

    >>> q = QParams(0.5, 10, 0, 127, torch.uint8)
    >>> q.is_full_range, q.bounds, str(q)
    (False, (-5.0, 58.5), 'uint8 [0, 127] scale 0.5 zero point 10')
    """

    scale: ScaleT
    zero_point: ZeroPointT
    quant_min: int
    quant_max: int
    dtype: torch.dtype
    axis: int | None = None
    block: tuple[int, ...] | None = None
    qscheme: torch.qscheme | None = None
    is_dynamic: bool = False
    eps: float = 0.0
    per_token: bool = False
    groups: Granularity | None = None
    scale_dtype: torch.dtype | None = None

    @property
    def storage(self) -> torch.dtype:
        """The dtype of the tensor that holds the quantized values."""
        return storage_dtype(self.dtype)

    @property
    def is_full_range(self) -> bool:
        """Whether the integers may take every value of the dtype."""
        low, high = integer_range(self.dtype) or (self.quant_min, self.quant_max)
        return self.quant_min <= low and self.quant_max >= high

    @property
    def per_channel(self) -> bool:
        """Whether there is one scale per slice along ``axis``."""
        return self.axis is not None or is_per_channel(self.qscheme)

    @property
    def number(self) -> QParams:
        """The same with numbers for tensors and the storage for the token; needs a single scale."""
        scale: Any = self.scale
        zero_point: Any = self.zero_point
        ends = self.quant_min, self.quant_max
        return QParams(float(scale), int(zero_point), *ends, self.storage)

    @property
    def bounds(self: QParams) -> tuple[float, float]:
        """The float values of ``quant_min`` and ``quant_max``."""
        return (
            (self.quant_min - self.zero_point) * self.scale,
            (self.quant_max - self.zero_point) * self.scale,
        )

    @property
    def args(self: QParams) -> tuple[float, int]:
        """Scale and zero point, as kernels take them."""
        return self.scale, self.zero_point

    @property
    def literals(self: QParams) -> tuple[float, int, int, int, torch.dtype]:
        """The arguments of a quantize or dequantize node after its tensor."""
        return self.scale, self.zero_point, self.quant_min, self.quant_max, self.dtype

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)} [{self.quant_min}, {self.quant_max}]"
        if isinstance(self.scale, float | int):
            text += f" scale {self.scale:.6g} zero point {self.zero_point}"
        return text


#: Of weights: scale and zero point are tensors.
TensorQParams = QParams[torch.Tensor, torch.Tensor]
#: Of what was observed: None where nothing is measured before inference.
ObservedQParams = QParams["torch.Tensor | None", "torch.Tensor | None"]
