"""Sums of absolute quantized weights: what an accumulator has to hold, per output channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backquant.dtypes import (
    Granularity,
    QParams,
    block_of,
    dequantize_tensor,
    integer_range,
    quantize_tensor,
)
from backquant.qconfig import QConfig


@dataclass(frozen=True)
class WeightSums:
    """Quantizes a weight as a QConfig asks, and sums each channel.

    >>> from backquant.observe import MinMaxObserver
    >>> asked = QConfig(None, MinMaxObserver.with_args(
    ...     dtype=torch.qint8, qscheme=torch.per_tensor_symmetric, quant_min=-127, quant_max=127))
    >>> WeightSums(asked)(torch.tensor([[1.0, -1.0], [0.5, 0.0]]), 0)
    (254, 64)
    """

    qconfig: QConfig | None

    def __call__(self, weight: Tensor, axis: int) -> tuple[Any, ...] | None:
        """The sum of each channel on ``axis``; ``None`` where no integers are asked for."""
        if self.qconfig is None or self.qconfig.weight is None:
            return None
        observer = self.qconfig.weight()
        limits = integer_range(getattr(observer, "dtype", None))
        if limits is None:
            return None
        shared = getattr(observer, "granularity", "")
        if shared and Granularity.parse(shared).undivided(weight.shape) is not None:
            return None
        with torch.no_grad():
            observer(weight.detach())
            scale, zero_point = observer.calculate_qparams()
        measured = getattr(observer, "activation_post_process", observer)
        if scale.dim() > 1:
            return _of_blocks(weight.detach(), (scale, zero_point), measured, axis)
        along = getattr(measured, "ch_axis", 0)
        shape = [1] * weight.dim()
        shape[along if scale.numel() > 1 else 0] = -1
        low = limits[0] if measured.quant_min is None else measured.quant_min
        high = limits[1] if measured.quant_max is None else measured.quant_max
        steps = torch.round(weight.detach() / scale.view(shape)) + zero_point.view(shape)
        distance = (steps.clamp(low, high) - zero_point.view(shape)).abs().double()
        others = [a for a in range(weight.dim()) if a != axis]
        return tuple(int(total) for total in distance.sum(dim=others))


def _of_blocks(
    weight: Tensor, qparams: tuple[Tensor, Tensor], measured: Any, axis: int
) -> tuple[Any, ...]:
    scale, zero_point = qparams
    block = block_of(weight.shape, scale.shape)
    ends = measured.quant_min, measured.quant_max
    q = quantize_tensor(weight, QParams(scale, zero_point, *ends, measured.dtype, block=block))
    distance = dequantize_tensor(q, torch.ones_like(scale), zero_point, block=block).abs().double()
    others = [a for a in range(weight.dim()) if a != axis]
    return tuple(int(total) for total in distance.sum(dim=others))
