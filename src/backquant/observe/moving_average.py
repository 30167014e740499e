"""Moving averages of the range, per tensor and per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backquant.errors import ConfigError
from backquant.observe.base import EPS, ObserverBase
from backquant.observe.minmax import (
    MinMaxObserver,
    PerChannelMinMaxObserver,
    finite_range,
)


class MovingAverageMinMaxObserver(MinMaxObserver):
    """The range moves towards that of each batch by ``averaging_constant``; per tensor.

    The first batch sets the range; then ``min += averaging_constant * (min of batch - min)``.
    The result depends on the order of batches, so ``merge`` refuses.

    >>> observer = MovingAverageMinMaxObserver(averaging_constant=0.5)
    >>> for batch in ([0.0, 1.0], [0.0, 3.0]):
    ...     _ = observer(torch.tensor(batch))
    >>> observer.max_val
    tensor(2.)
    """

    def __init__(  # the signature is PyTorch's
        self,
        averaging_constant: float = 0.01,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float = EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        if is_dynamic and averaging_constant != 1:
            raise ConfigError(
                "a dynamic range is that of one batch alone: it has no moving average",
                where=f"{type(self).__name__}(averaging_constant={averaging_constant})",
                fix="set averaging_constant=1",
            )
        more: dict[str, Any] = {"eps": eps, "is_dynamic": is_dynamic, **kwargs}
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, **more)
        self.averaging_constant = averaging_constant

    def forward(self, x: Tensor) -> Tensor:
        """Move the range towards that of ``x`` (any shape); returns ``x``."""
        low, high, ignored = finite_range(x.detach().to(self.min_val.dtype))
        self.ignored += ignored
        if low > high:  # no finite value
            return x
        if not (self.min_val == float("inf") and self.max_val == float("-inf")):
            low = self.min_val + self.averaging_constant * (low - self.min_val)
            high = self.max_val + self.averaging_constant * (high - self.max_val)
        self.min_val.copy_(low)
        self.max_val.copy_(high)
        return x

    def merge(self, other: ObserverBase) -> MovingAverageMinMaxObserver:  # noqa: ARG002
        """Always raises ConfigError: a moving average depends on the order of batches."""
        raise _order_dependent(self)


class MovingAveragePerChannelMinMaxObserver(PerChannelMinMaxObserver):
    """Moving average of the range of every channel along ``ch_axis``; ``merge`` refuses.

    >>> observer = MovingAveragePerChannelMinMaxObserver(averaging_constant=0.5)
    >>> for batch in ([[0.0, 1.0]], [[0.0, 3.0]]):
    ...     _ = observer(torch.tensor(batch))
    >>> observer.max_val
    tensor([2.])
    """

    def __init__(  # the signature is PyTorch's
        self,
        averaging_constant: float = 0.01,
        ch_axis: int = 0,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_channel_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float = EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        more: dict[str, Any] = {"eps": eps, "is_dynamic": is_dynamic, **kwargs}
        super().__init__(ch_axis, dtype, qscheme, reduce_range, quant_min, quant_max, **more)
        self.averaging_constant = averaging_constant

    def forward(self, x: Tensor) -> Tensor:
        """Move every channel's range towards that of ``x``; returns ``x``."""
        if x.numel() == 0:
            return x
        low, high, ignored = self._ranges(x.detach().to(self.min_val.dtype))
        self.ignored += ignored
        if self.min_val.numel() > 0:
            self._check_parts(low)
            low = _move(self.min_val, low, self.averaging_constant)
            high = _move(self.max_val, high, self.averaging_constant)
        self._set_range(low, high)
        return x

    def merge(self, other: ObserverBase) -> MovingAveragePerChannelMinMaxObserver:  # noqa: ARG002
        """Always raises ConfigError: a moving average depends on the order of batches."""
        raise _order_dependent(self)


def _move(before: Tensor, now: Tensor, constant: float) -> Tensor:
    """The average, except where either side holds no value yet (then the other side)."""
    moved = before + constant * (now - before)
    moved = torch.where(torch.isfinite(before), moved, now)
    return torch.where(torch.isfinite(now), moved, before)


def _order_dependent(observer: ObserverBase) -> ConfigError:
    name = type(observer).__name__
    return ConfigError(
        f"{name} cannot be merged: a moving average depends on the order of the batches, so two "
        "averages do not determine the average over both",
        where=f"{name}.merge",
        fix=f"calibrate with {name.replace('MovingAverage', '')} or HistogramObserver, or feed "
        "all batches to one observer",
    )
