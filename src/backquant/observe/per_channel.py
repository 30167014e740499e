"""PerChannelMinMaxObserver: smallest and largest value of every channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backquant.dtypes import is_per_channel
from backquant.errors import ConfigError
from backquant.observe.base import EPS, UniformQuantizationObserverBase
from backquant.observe.minmax import check_reduced_symmetric
from backquant.observe.qparams import with_shape
from backquant.observe.ranges import channel_range, check_channels


class PerChannelMinMaxObserver(UniformQuantizationObserverBase):
    """Records smallest and largest value of every channel along ``ch_axis``.

    Empty inputs, NaN and infinite values leave the range unchanged; a channel that never held a
    finite value counts as all zero. A batch with another number of channels raises
    CalibrationError. Merging is exact.

    >>> observer = PerChannelMinMaxObserver(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    >>> _ = observer(torch.tensor([[-1.0, 1.275], [2.55, 0.0]]))
    >>> observer.calculate_qparams()
    (tensor([0.0100, 0.0200]), tensor([0, 0]))
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(  # the signature is PyTorch's
        self,
        ch_axis: int = 0,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_channel_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        if not is_per_channel(qscheme):
            raise ConfigError(
                f"{name} measures one range per channel and was requested with {qscheme}",
                where=f"{name}(qscheme={qscheme})",
                fix="use torch.per_channel_affine or torch.per_channel_symmetric, "
                f"or {name.replace('PerChannel', '')}",
            )
        if is_dynamic:
            raise ConfigError(
                f"{name} cannot measure at inference: kernels take dynamic ranges per tensor",
                where=f"{name}(is_dynamic=True)",
                fix="use PlaceholderObserver.with_args(is_dynamic=True)",
            )
        super().__init__(
            dtype=dtype,
            qscheme=qscheme,
            reduce_range=reduce_range,
            quant_min=quant_min,
            quant_max=quant_max,
            factory_kwargs=factory_kwargs,
            eps=eps,
            is_dynamic=is_dynamic,
            **kwargs,
        )
        made = torch.nn.factory_kwargs(factory_kwargs)
        self.ch_axis = ch_axis
        self.register_buffer("min_val", torch.tensor([], **made))
        self.register_buffer("max_val", torch.tensor([], **made))
        check_reduced_symmetric(self)

    def forward(self, x: Tensor) -> Tensor:
        """Widen every channel's range to hold ``x`` (at least one dimension); returns ``x``."""
        if x.numel() == 0:
            return x
        low, high, ignored = channel_range(x.detach().to(self.min_val.dtype), self.ch_axis)
        self.ignored += ignored
        self._widen(low, high)
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point, each of shape ``[channels]``; 1 and 0, warned, before any data."""
        return self._calculate_qparams(self.min_val, self.max_val)

    def reset_min_max_vals(self) -> None:
        """Forget the ranges."""
        self.min_val = self.min_val.new_empty(0)
        self.max_val = self.max_val.new_empty(0)

    def _widen(self, low: Tensor, high: Tensor) -> None:
        if self.min_val.numel() > 0:
            check_channels(self.min_val, low, self.ch_axis)
            low, high = torch.minimum(low, self.min_val), torch.maximum(high, self.max_val)
        self._set_range(low, high)

    def _set_range(self, low: Tensor, high: Tensor) -> None:
        with_shape(self.min_val, low.shape).copy_(low)
        with_shape(self.max_val, high.shape).copy_(high)

    def _absorb(self, other: PerChannelMinMaxObserver) -> None:
        if other.min_val.numel() > 0:
            self._widen(other.min_val, other.max_val)

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """The buffers take the shape of what is loaded; versions below 3 have older names."""
        older = (local_metadata.get("version") or 3) < 3
        for name in ("min_val", "max_val"):
            if older and prefix + name + "s" in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + name + "s")
            if prefix + name in state_dict:
                with_shape(getattr(self, name), state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
