"""MinMaxObserver: the range is the smallest and the largest value ever seen."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backquant.dtypes import is_per_channel, is_per_tensor
from backquant.errors import CalibrationError, ConfigError
from backquant.observe.base import EPS, UniformQuantizationObserverBase
from backquant.observe.protocol import with_shape

# Smallest and largest finite value of a tensor, whole or per channel.


class FiniteRange(NamedTuple):
    """Extremes of the finite values, (inf, -inf) where there is none, and how many others there are."""

    low: Tensor
    high: Tensor
    ignored: int


def finite_range(x: Tensor) -> FiniteRange:
    """Smallest and largest finite value of float ``x`` (any shape), each of shape ``[]``.

    >>> finite_range(torch.tensor([[2.0, -1.0, float("nan")]]))
    FiniteRange(low=tensor(-1.), high=tensor(2.), ignored=1)
    """
    if x.numel() == 0:
        return _nothing(x, 0)
    low, high = torch.aminmax(x)
    if all_finite(low, high):
        return FiniteRange(low, high, 0)
    kept = x[torch.isfinite(x)]
    ignored = x.numel() - kept.numel()
    if kept.numel() == 0:
        return _nothing(x, ignored)
    return FiniteRange(*torch.aminmax(kept), ignored)


def all_finite(low: Tensor, high: Tensor) -> bool:
    """Whether two extremes (``[]``) say that everything between is finite; False in doubt.

    One wait for the device. Doubt: two finite extremes whose difference overflows.

    >>> all_finite(torch.tensor(0.0), torch.tensor(1.0)), all_finite(*torch.tensor([0.0, torch.nan]))
    (True, False)
    """
    return math.isfinite((high - low).item())


def channel_range(x: Tensor, axis: int) -> FiniteRange:
    """Smallest and largest finite value of every channel, each of shape ``[x.size(axis)]``.

    Raises ConfigError when ``x`` has no such axis.

    >>> low, high, _ = channel_range(torch.tensor([[2.0, -1.0], [3.0, 4.0]]), 0)
    >>> low, high
    (tensor([-1.,  3.]), tensor([2., 4.]))
    """
    if not -x.dim() <= axis < x.dim():
        raise ConfigError(
            f"a tensor of {x.dim()} dimensions has no channel axis {axis}",
            where=f"shape {list(x.shape)}, ch_axis={axis}",
            fix=f"use an observer with ch_axis between {-x.dim()} and {x.dim() - 1}",
        )
    others = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    if not others:
        others, x = [1], x.unsqueeze(1)
    low, high = x.amin(others), x.amax(others)  # each is vectorised, unlike aminmax(dim=...)
    if bool(torch.isfinite(high - low).all()):
        return FiniteRange(low, high, 0)
    finite = torch.isfinite(x)
    low = x.masked_fill(~finite, math.inf).amin(others)
    high = x.masked_fill(~finite, -math.inf).amax(others)
    return FiniteRange(low, high, x.numel() - int(finite.sum()))


def _nothing(x: Tensor, ignored: int) -> FiniteRange:
    return FiniteRange(x.new_tensor(math.inf), x.new_tensor(-math.inf), ignored)


class MinMaxObserver(UniformQuantizationObserverBase):
    """Records the smallest and largest value; per tensor. Arguments as of the base class.

    Empty inputs, NaN and infinite values leave the range unchanged (PyTorch's would keep the
    NaN or the infinity, and with it a useless scale). Merging is exact.

    >>> observer = MinMaxObserver(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    >>> _ = observer(torch.tensor([-1.0, 1.275]))
    >>> observer.calculate_qparams()
    (tensor([0.0100]), tensor([0]))
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(  # the signature is PyTorch's
        self,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        check_per_tensor(type(self).__name__, qscheme)
        ends = (quant_min, quant_max)
        super().__init__(
            dtype, qscheme, reduce_range, *ends, factory_kwargs, eps, is_dynamic, **kwargs
        )
        made = torch.nn.factory_kwargs(factory_kwargs)
        self.register_buffer("min_val", torch.tensor(float("inf"), **made))
        self.register_buffer("max_val", torch.tensor(float("-inf"), **made))
        check_reduced_symmetric(self)

    def forward(self, x: Tensor) -> Tensor:
        """Widen the range to hold ``x`` (any shape, any real dtype); returns ``x``."""
        low, high, ignored = finite_range(x.detach().to(self.min_val.dtype))
        self.ignored += ignored
        self.min_val.copy_(torch.minimum(self.min_val, low))
        self.max_val.copy_(torch.maximum(self.max_val, high))
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale (float32 ``[1]``) and zero point (``[1]``); 1 and 0, warned, before any data."""
        return self._calculate_qparams(self.min_val, self.max_val)

    def reset_min_max_vals(self) -> None:
        """Forget the range."""
        self.min_val.fill_(float("inf"))
        self.max_val.fill_(float("-inf"))

    def _absorb(self, other: MinMaxObserver) -> None:
        self.min_val.copy_(torch.minimum(self.min_val, other.min_val))
        self.max_val.copy_(torch.maximum(self.max_val, other.max_val))

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"


def check_per_tensor(name: str, qscheme: torch.qscheme) -> None:
    """Raise ConfigError unless ``qscheme`` is a per-tensor one."""
    if not is_per_tensor(qscheme):
        raise ConfigError(
            f"{name} measures one range per tensor and was requested with {qscheme}",
            where=f"{name}(qscheme={qscheme})",
            fix="use torch.per_tensor_affine or torch.per_tensor_symmetric, "
            f"or {name.replace('MinMax', 'PerChannelMinMax')}",
        )


def check_reduced_symmetric(observer: UniformQuantizationObserverBase) -> None:
    """Raise ConfigError for quint8 with a symmetric scheme and a reduced range."""
    symmetric = observer.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    if symmetric and observer.reduce_range and observer.dtype == torch.quint8:
        raise ConfigError(
            "quint8 has no symmetric reduced range: its zero point 128 lies outside of 0..127",
            where=f"{type(observer).__name__}(dtype=torch.quint8, reduce_range=True)",
            fix="use dtype=torch.qint8, or quant_min=0, quant_max=127",
        )


# Smallest and largest value of every part: of every channel, or of every block.


class PartsMinMaxObserver(UniformQuantizationObserverBase):
    """Base of observers that record smallest and largest value of many parts of a tensor.

    The buffers are empty before any data, and take the shape of what is loaded. Merging is exact.
    """

    min_val: Tensor
    max_val: Tensor

    def _forget_shapes(self, factory_kwargs: dict[str, Any] | None) -> None:
        made = torch.nn.factory_kwargs(factory_kwargs)
        self.register_buffer("min_val", torch.tensor([], **made))
        self.register_buffer("max_val", torch.tensor([], **made))

    @abstractmethod
    def _ranges(self, x: Tensor) -> FiniteRange:
        """Those of each part of ``x``."""

    @abstractmethod
    def _check_parts(self, low: Tensor) -> None:
        """Raise an error when a batch has other parts than those before."""

    def forward(self, x: Tensor) -> Tensor:
        """Widen the range of every part to hold ``x`` (at least one dimension); returns ``x``."""
        if x.numel() == 0:
            return x
        low, high, ignored = self._ranges(x.detach().to(self.min_val.dtype))
        self.ignored += ignored
        self._widen(low, high)
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point of each part; 1 and 0, warned, before any data."""
        return self._calculate_qparams(self.min_val, self.max_val)

    def reset_min_max_vals(self) -> None:
        """Forget the ranges."""
        self.min_val = self.min_val.new_empty(0)
        self.max_val = self.max_val.new_empty(0)

    def _widen(self, low: Tensor, high: Tensor) -> None:
        if self.min_val.numel() > 0:
            self._check_parts(low)
            low, high = torch.minimum(low, self.min_val), torch.maximum(high, self.max_val)
        self._set_range(low, high)

    def _set_range(self, low: Tensor, high: Tensor) -> None:
        with_shape(self.min_val, low.shape).copy_(low)
        with_shape(self.max_val, high.shape).copy_(high)

    def _absorb(self, other: PartsMinMaxObserver) -> None:
        if other.min_val.numel() > 0:
            self._widen(other.min_val, other.max_val)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Versions below 3 have older names."""
        older = (local_metadata.get("version") or 3) < 3
        for name in ("min_val", "max_val"):
            if older and prefix + name + "s" in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + name + "s")
            if prefix + name in state_dict:
                with_shape(getattr(self, name), state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class PerChannelMinMaxObserver(PartsMinMaxObserver):
    """Records smallest and largest value of every channel along ``ch_axis``.

    Empty inputs, NaN and infinite values leave the range unchanged; a channel that never held a
    finite value counts as all zero. A batch with another number of channels raises
    CalibrationError. Merging is exact.

    >>> observer = PerChannelMinMaxObserver(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    >>> _ = observer(torch.tensor([[-1.0, 1.275], [2.55, 0.0]]))
    >>> observer.calculate_qparams()
    (tensor([0.0100, 0.0200]), tensor([0, 0]))
    """

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
        ends = (quant_min, quant_max)
        super().__init__(
            dtype, qscheme, reduce_range, *ends, factory_kwargs, eps, is_dynamic, **kwargs
        )
        self.ch_axis = ch_axis
        self._forget_shapes(factory_kwargs)
        check_reduced_symmetric(self)

    def _ranges(self, x: Tensor) -> FiniteRange:
        return channel_range(x, self.ch_axis)

    def _check_parts(self, low: Tensor) -> None:
        if self.min_val.shape != low.shape:
            raise CalibrationError(
                f"a per-channel observer saw {self.min_val.numel()} channels and now {low.numel()}",
                where=f"ch_axis={self.ch_axis}",
                fix="feed tensors with one number of channels, or choose the axis that is constant",
            )

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"
