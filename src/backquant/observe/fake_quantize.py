"""Fake-quantizers: modules that measure a range and round to it in float, with gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from backquant.dtypes import is_per_channel, is_per_tensor, is_symmetric, quantize_bounds
from backquant.errors import ConfigError
from backquant.observe.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from backquant.observe.placeholder import FixedQParamsObserver
from backquant.observe.protocol import with_args, with_callable_args, with_shape

# Rounding to quantized values in float, with gradients: what ``torch.fake_quantize_*`` compute.
#
# ``(clamp(round(x / scale) + zero_point, low, high) - zero_point) * scale``; gradients pass where
# nothing was clamped (straight-through estimator).
#
# On a CPU PyTorch's kernels round one number at a time, their backward multiplies by a mask of another
# dtype, and its smallest and largest value per channel are found one by one, too. Here the same numbers
# come from vectorised operators, on parts that stay in the cache: a third to a twentieth of the time.

_PART = 1 << 16  # numbers rounded at a time
_SMALL = 1 << 12  # tensors below are not worth it


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` can be looked at and rounded in parts: float32 on a CPU, run and not traced.

    >>> is_plain(torch.zeros(100, 100)), is_plain(torch.zeros(2)), is_plain(torch.zeros(100, 100).half())
    (True, False, False)
    """
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() >= _SMALL
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def channel_ends(x: Tensor, axis: int) -> Tensor:
    """Smallest and largest value of every channel along ``axis``, ``[channels, 2]``.

    >>> channel_ends(torch.tensor([[2.0, -1.0], [3.0, 4.0]]), 0)
    tensor([[-1.,  2.],
            [ 3.,  4.]])
    """
    others = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    if not others:
        return torch.stack((x, x), 1)
    return torch.stack((x.amin(others), x.amax(others)), 1)


def rounded(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, bounds: Any) -> Tensor:
    """``x`` (any shape) rounded with ``scale`` and ``zero_point``: ``[1]``, or ``[channels]`` along
    ``axis``. ``bounds``: the least and the largest integer.

    >>> scale, zero_point = torch.tensor([0.5]), torch.tensor([1])
    >>> rounded(torch.tensor([-3.0, 0.3, 9.0]), scale, zero_point, None, (0, 15))
    tensor([-0.5000,  0.5000,  7.0000])
    """
    if is_plain(x) and not zero_point.is_floating_point() and scale.dtype == torch.float32:
        result: Tensor = _Rounded.apply(x, scale, zero_point, axis, bounds)
        return result
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, *bounds)
    return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, *bounds)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, bounds: Any
    ) -> Tensor:
        result = torch.empty_like(x)
        if result.stride() != x.stride():  # gaps, or one number in several places
            x = x.contiguous()
            result = torch.empty_like(x)
        inside = torch.empty_like(x, dtype=torch.bool)
        if axis is None:
            _round_whole((x, result, inside), scale, zero_point, bounds)
        else:
            _round_channels((x, result, inside), scale, zero_point, axis, bounds)
        ctx.save_for_backward(inside)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grads[0], 0.0), None, None, None, None


def _round_whole(
    tensors: tuple[Tensor, Tensor, Tensor], scale: Tensor, zero_point: Tensor, bounds: Any
) -> None:
    step, zero = scale.reshape(()), int(zero_point)
    inverse = 1.0 / step
    low, high = bounds[0] - zero, bounds[1] - zero
    flat = [_as_line(tensor) for tensor in tensors]
    for start in range(0, len(flat[0]), _PART):
        x, result, inside = (tensor[start : start + _PART] for tensor in flat)
        nearest = torch.mul(x, inverse, out=result).round_()
        clamped = nearest.clamp(low, high)
        torch.eq(clamped, nearest, out=inside)
        torch.mul(clamped, step, out=result)


def _as_line(tensor: Tensor) -> Tensor:
    """The numbers of a tensor without gaps, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _round_channels(
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: Tensor,
    zero_point: Tensor,
    axis: int,
    bounds: Any,
) -> None:
    shape = [1] * tensors[0].dim()
    shape[axis] = -1
    steps, inverses = scale.view(shape), (1.0 / scale).view(shape)
    lows, highs = ((end - zero_point).to(torch.float32).view(shape) for end in bounds)
    rows = tensors[0].size(0)
    many = max(1, _PART * rows // tensors[0].numel())
    by_row = axis % tensors[0].dim() == 0
    for start in range(0, rows, many):
        part = slice(start, start + many)
        own = part if by_row else slice(None)
        x, result, inside = (tensor[part] for tensor in tensors)
        nearest = torch.mul(x, inverses[own], out=result).round_()
        clamped = nearest.clamp(lows[own], highs[own])
        torch.eq(clamped, nearest, out=inside)
        torch.mul(clamped, steps[own], out=result)


_HALVES = (torch.float16, torch.bfloat16)


class FakeQuantizeBase(ABC, nn.Module):
    """Base of fake-quantizers. Two buffers, ``fake_quant_enabled`` and ``observer_enabled``
    (uint8 ``[1]``), switch rounding and measuring; as buffers they follow a model to its replicas.
    """

    with_args = classmethod(with_args)
    with_callable_args = classmethod(with_callable_args)

    fake_quant_enabled: Tensor
    observer_enabled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.uint8))
        self.register_buffer("observer_enabled", torch.tensor([1], dtype=torch.uint8))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A model in half precision has ranges and scales in float32: both are measured in that."""

        def moved(state: Tensor) -> Tensor:
            made = fn(state)
            is_half = made.dtype in (torch.float16, torch.bfloat16)
            return state.to(made.device) if is_half else made

        return super()._apply(moved, recurse)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Measure ``x`` if enabled; return it rounded if enabled."""

    @abstractmethod
    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point for what was measured."""

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Round from now on (or not)."""
        self.fake_quant_enabled[0] = 1 if enabled else 0

    def disable_fake_quant(self) -> None:
        """Return inputs as they are from now on."""
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """Measure from now on (or not)."""
        self.observer_enabled[0] = 1 if enabled else 0

    def disable_observer(self) -> None:
        """Keep scale and zero point as they are from now on."""
        self.enable_observer(False)


class FakeQuantize(FakeQuantizeBase):
    """Measures with an observer and rounds to what it found:
    ``(clamp(round(x / scale + zero_point), quant_min, quant_max) - zero_point) * scale``.

    Gradients pass where ``x`` lies inside of the range (straight-through estimator; Jacob et al.,
    "Quantization and Training of Neural Networks", 2018).

    Args: ``observer``: an observer class or factory; ``quant_min``, ``quant_max``: its range, when
    both are given; ``is_dynamic``; ``observer_kwargs``: its further arguments. Raises ConfigError
    for a range outside of the dtype, and for a dtype of floats.

    >>> fake_quantize = FakeQuantize(quant_min=0, quant_max=255)
    >>> fake_quantize(torch.tensor([0.0, 0.1234, 2.55]))
    tensor([0.0000, 0.1200, 2.5500])
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        observer: Any = MovingAverageMinMaxObserver,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_dynamic: bool = False,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        _check_integers(_requested_dtype(observer, observer_kwargs))
        if quant_min is not None and quant_max is not None:
            _check_bounds(quant_min, quant_max, _requested_dtype(observer, observer_kwargs))
            observer_kwargs.update(quant_min=quant_min, quant_max=quant_max)
        observer_kwargs["is_dynamic"] = is_dynamic
        measured = observer(**observer_kwargs)
        if getattr(measured, "granularity", ""):
            raise ConfigError(
                f"{type(self).__name__} rounds per tensor or per channel, not {measured.granularity}",
                where=f"{type(self).__name__}(observer={observer!r})",
                fix="train with one scale per channel, or quantize the trained model in groups",
            )
        self.activation_post_process = measured
        self.quant_min = measured.quant_min
        self.quant_max = measured.quant_max
        self.is_dynamic = measured.is_dynamic
        self.dtype = measured.dtype
        self.qscheme = measured.qscheme
        self.ch_axis = getattr(measured, "ch_axis", -1)
        self.is_per_channel = is_per_channel(self.qscheme)
        if not self.is_per_channel and not is_per_tensor(self.qscheme):
            raise ConfigError(
                f"{type(self).__name__} cannot round by the scheme {self.qscheme}",
                where=f"{type(self).__name__}(observer={observer!r})",
                fix="use an observer with a per-tensor or per-channel scheme",
            )
        real = self.qscheme == torch.per_channel_affine_float_qparams
        self.register_buffer("scale", torch.tensor([1.0], dtype=torch.float))
        self.register_buffer(
            "zero_point", torch.tensor([0], dtype=torch.float if real else torch.int)
        )

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """What the observer found."""
        scale, zero_point = self.activation_post_process.calculate_qparams()
        return scale, zero_point

    def forward(self, x: Tensor) -> Tensor:
        """Measure and round ``x`` (any shape); the result has its shape and dtype."""
        if x.dtype in _HALVES:
            return self(x.float()).to(x.dtype)  # type: ignore[no-any-return]
        if self.observer_enabled[0] == 1:
            self.activation_post_process(x.detach())
            self._take_over(*self.calculate_qparams())
        if self.fake_quant_enabled[0] == 0:
            return x
        low, high = self.activation_post_process.quant_min, self.activation_post_process.quant_max
        axis = self.ch_axis if self.is_per_channel else None
        return rounded(x, self.scale, self.zero_point, axis, (low, high))

    def merge(self, other: FakeQuantize) -> Self:
        """Merge the observers (see ``ObserverBase.merge``) and recompute scale and zero point.

        >>> from backquant.observe import MinMaxObserver
        >>> a, b = (FakeQuantize(observer=MinMaxObserver) for _ in range(2))
        >>> _ = a(torch.tensor([0.0, 1.0])), b(torch.tensor([0.0, 2.55]))
        >>> a.merge(b).scale
        tensor([0.0100])
        """
        if type(other) is not type(self):
            raise ConfigError(
                f"{type(self).__name__} cannot merge a {type(other).__name__}",
                where=f"{type(self).__name__}.merge",
                fix="merge fake-quantizers made by one factory",
            )
        self.activation_post_process.merge(other.activation_post_process)
        self._take_over(*self.calculate_qparams())
        return self

    def _take_over(self, scale: Tensor, zero_point: Tensor) -> None:
        with_shape(self.scale, scale.shape).copy_(scale)
        with_shape(self.zero_point, zero_point.shape).copy_(zero_point)

    def extra_repr(self) -> str:
        return (
            f"fake_quant_enabled={self.fake_quant_enabled.tolist()}, "
            f"observer_enabled={self.observer_enabled.tolist()}, "
            f"quant_min={self.quant_min}, quant_max={self.quant_max}, dtype={self.dtype}, "
            f"qscheme={self.qscheme}, ch_axis={self.ch_axis}, "
            f"scale={self.scale}, zero_point={self.zero_point}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """The buffers take the shape of what is loaded: per channel it is known only then."""
        for name in ("scale", "zero_point"):
            if prefix + name in state_dict:
                with_shape(getattr(self, name), state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class FixedQParamsFakeQuantize(FakeQuantize):
    """Rounds with given scale and zero point; per tensor.

    Args: ``observer``: a factory of FixedQParamsObserver; anything else raises ConfigError.

    >>> from backquant.observe import default_fixed_qparams_range_0to1_observer
    >>> fake = FixedQParamsFakeQuantize(default_fixed_qparams_range_0to1_observer)
    >>> fake(torch.tensor([0.5, 2.0]))
    tensor([0.5000, 0.9961])
    """

    def __init__(self, observer: Any) -> None:
        super().__init__(observer=observer)
        measured = self.activation_post_process
        if type(measured) is not FixedQParamsObserver or not is_per_tensor(self.qscheme):
            raise ConfigError(
                "FixedQParamsFakeQuantize needs a per-tensor FixedQParamsObserver, "
                f"not {type(measured).__name__}",
                where=f"FixedQParamsFakeQuantize(observer={observer!r})",
                fix="observer=FixedQParamsObserver.with_args(scale=..., zero_point=...)",
            )
        self._observer_ctr = observer
        self.scale = measured.scale
        self.zero_point = measured.zero_point

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The given scale and zero point."""
        return self.scale, self.zero_point


class FusedMovingAvgObsFakeQuantize(FakeQuantize):
    """FakeQuantize over a moving average, in one kernel: measures, averages and rounds.

    Args as of FakeQuantize; ``observer`` is a moving-average class or factory, else ConfigError.
    A batch (per channel: a channel) with NaN or infinite values leaves range, scale and zero point
    as they were; what comes out for it is not defined.

    >>> fake_quantize = FusedMovingAvgObsFakeQuantize()
    >>> fake_quantize(torch.tensor([0.0, 0.1234, 2.55]))
    tensor([0.0000, 0.1200, 2.5500])
    """

    def __init__(
        self,
        observer: Any = MovingAverageMinMaxObserver,
        quant_min: int | None = 0,
        quant_max: int | None = 255,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__(observer, quant_min, quant_max, **observer_kwargs)
        measured = self.activation_post_process
        fusable = (MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver)
        if not isinstance(measured, fusable):
            raise ConfigError(
                f"the fused kernel computes moving averages, not a {type(measured).__name__}",
                where=f"FusedMovingAvgObsFakeQuantize(observer={observer!r})",
                fix="use a MovingAverage* observer, or FakeQuantize",
            )
        self.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.long))
        self.register_buffer("observer_enabled", torch.tensor([1], dtype=torch.long))
        self.is_symmetric_quant = is_symmetric(self.qscheme)

    def forward(self, x: Tensor) -> Tensor:
        """Measure and round ``x`` (any shape); the result has its shape and dtype."""
        if x.numel() == 0:
            return x
        if x.dtype in _HALVES:
            return self(x.float()).to(x.dtype)  # type: ignore[no-any-return]
        measured = self.activation_post_process
        state = (measured.min_val, measured.max_val, self.scale, self.zero_point)
        self.take_shape(x)
        on_cpu = x.device.type == "cpu"  # where looking at a value does not wait for anything
        if on_cpu and not self.observer_enabled.item():
            return self._kernel(x, self.observer_enabled)
        before = [buffer.clone() for buffer in state]
        try:
            result = self._kernel(x, self.observer_enabled)
        except RuntimeError:  # per channel the kernel refuses the zero point of a bad channel
            _keep_finite(state, before)
            if bool(torch.isfinite(x).all()):
                raise
            return self._kernel(x, torch.zeros_like(self.observer_enabled))
        if not (on_cpu and math.isfinite((state[1] - state[0]).sum().item())):
            _keep_finite(state, before)
        return result

    def take_shape(self, x: Tensor) -> None:
        """Give the buffers an entry for each channel of ``x``, where nothing was measured: averages of models
        (``torch.optim.swa_utils``) are copied before the first step, and need the shapes to stay.

        >>> from backquant.observe import MovingAveragePerChannelMinMaxObserver
        >>> fake_quantize = FusedMovingAvgObsFakeQuantize(MovingAveragePerChannelMinMaxObserver)
        >>> fake_quantize.take_shape(torch.zeros(3, 2))
        >>> fake_quantize.scale
        tensor([1., 1., 1.])
        """
        measured = self.activation_post_process
        if self.is_per_channel and measured.min_val.numel() == 0:
            state = (measured.min_val, measured.max_val, self.scale, self.zero_point)
            _fill_fresh(state, x.size(self.ch_axis))

    def _kernel(self, x: Tensor, observer_enabled: Tensor) -> Tensor:
        by_parts = is_plain(x) and not self.zero_point.is_floating_point()
        if not by_parts or (self.is_per_channel and self.ch_axis != 0):
            return self._fused(x, observer_enabled)
        if observer_enabled.item():
            with torch.no_grad():  # the ends have the range of the whole
                per_channel = self.is_per_channel
                ends = channel_ends(x, 0) if per_channel else torch.stack(torch.aminmax(x))
                self._fused(ends, observer_enabled)
        if not self.fake_quant_enabled.item():
            return x
        measured = self.activation_post_process
        axis = self.ch_axis if self.is_per_channel else None
        bounds = (measured.quant_min, measured.quant_max)
        return rounded(x, self.scale, self.zero_point, axis, bounds)

    def _fused(self, x: Tensor, observer_enabled: Tensor) -> Tensor:
        measured = self.activation_post_process
        return torch.fused_moving_avg_obs_fake_quant(
            x,
            observer_enabled,
            self.fake_quant_enabled,
            measured.min_val,
            measured.max_val,
            self.scale,
            self.zero_point,
            measured.averaging_constant,
            measured.quant_min,
            measured.quant_max,
            self.ch_axis,
            self.is_per_channel,
            self.is_symmetric_quant,
        )


def _requested_dtype(observer: Any, observer_kwargs: dict[str, Any]) -> torch.dtype:
    filled_in = getattr(getattr(observer, "p", None), "keywords", {})
    dtype = filled_in.get("dtype", observer_kwargs.get("dtype", torch.quint8))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check_integers(dtype: torch.dtype) -> None:
    if dtype.is_floating_point:
        raise ConfigError(
            f"fake quantization rounds to integers; {dtype} has no quantization-aware training",
            where=f"FakeQuantize(dtype={dtype})",
            fix="train in float, then quantize: an observer in its place, and prepare_fx",
        )


def _check_bounds(quant_min: int, quant_max: int, dtype: torch.dtype) -> None:
    low, high = quantize_bounds(dtype)
    if not low <= quant_min <= quant_max <= high:
        raise ConfigError(
            f"the range {quant_min}..{quant_max} is empty or outside of {dtype}",
            where=f"quant_min={quant_min}, quant_max={quant_max}, dtype={dtype}",
            fix=f"use bounds within {low}..{high}",
        )


def _keep_finite(state: tuple[Tensor, ...], before: list[Tensor]) -> None:
    """Put back, where the new range is not finite, what the buffers held before.

    ``state``: minimum, maximum, scale, zero point.
    """
    finite = torch.isfinite(state[0]) & torch.isfinite(state[1])
    for buffer, old in zip(state, before, strict=True):
        buffer.copy_(torch.where(finite, buffer, old))


def _fill_fresh(state: tuple[Tensor, ...], channels: int) -> None:
    """One entry per channel, which says that no data were seen. (The kernel would resize them.)"""
    for buffer, value in zip(state, (float("inf"), float("-inf"), 1.0, 0), strict=True):
        with_shape(buffer, (channels,)).fill_(value)
