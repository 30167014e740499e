"""HistogramObserver: the range that loses least, found on exactly mergeable integer counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backquant.errors import ConfigError
from backquant.observe.base import EPS, UniformQuantizationObserverBase
from backquant.observe.histogram_grid import Bins, count_bins, merge_bins
from backquant.observe.histogram_search import best_range
from backquant.observe.minmax import check_per_tensor, check_reduced_symmetric
from backquant.observe.ranges import finite_range

__all__ = ["HistogramObserver"]

_BUFFERS = {
    "bin_key": torch.int32,
    "bin_count": torch.int64,
    "bin_low": torch.float32,
    "bin_high": torch.float32,
}


class HistogramObserver(UniformQuantizationObserverBase):
    """Counts values on a fixed grid and clips the range where that lowers the squared error.

    Args as of PyTorch's class. ``bins`` sets the resolution: every power-of-two interval
    ``[2**e, 2**(e+1))`` of either sign is divided into ``bins / 8`` bins (rounded up to a power of
    two, 1 to 4096), whose width is thus a power of two and whose edges are multiples of it; the
    grid is the same for all observers.

    State: of every bin that is not empty its number (``bin_key``, int32 ``[k]``, ascending), its
    count (``bin_count``, int64) and its extremes (``bin_low``, ``bin_high``, float32); ``min_val``
    and ``max_val`` (float32 ``[]``) are the extremes of all. The state is a function of the
    multiset of values seen, so any order of batches, and any tree of merges, gives the same
    qparams bit for bit. Memory is bounded by the grid (130,560 bins of 20 bytes for 2048); normal
    activations fill some thousand bins.

    NaN and infinite values are left out, with a RuntimeWarning.

    >>> observer = HistogramObserver()
    >>> _ = observer(torch.linspace(0, 2.55, 1000))
    >>> observer.calculate_qparams()
    (tensor([0.0100]), tensor([0], dtype=torch.int32))
    """

    min_val: Tensor
    max_val: Tensor
    bin_key: Tensor
    bin_count: Tensor
    bin_low: Tensor
    bin_high: Tensor

    def __init__(  # the signature is PyTorch's
        self,
        bins: int = 2048,
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
        if is_dynamic:
            raise ConfigError(
                "a histogram is measured in calibration, not at inference",
                where="HistogramObserver(is_dynamic=True)",
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
        self.bins = bins
        self.mantissa_bits = max(0, min(12, (max(bins, 1) - 1).bit_length() - 3))
        self.register_buffer("min_val", torch.tensor(float("inf"), **made))
        self.register_buffer("max_val", torch.tensor(float("-inf"), **made))
        empty = torch.empty(0, device=made.get("device"))
        for name, dtype_ in _BUFFERS.items():
            self.register_buffer(name, empty.clone().to(dtype_))
        check_reduced_symmetric(self)

    @property
    def state(self) -> Bins:
        """The bins that are not empty; float32 also after ``module.half()``."""
        low, high = self.bin_low.to(torch.float32), self.bin_high.to(torch.float32)
        return Bins(self.bin_key, self.bin_count, low, high)

    def forward(self, x: Tensor) -> Tensor:
        """Count the values of ``x`` (any shape, any real dtype); returns ``x``."""
        values = x.detach().to(torch.float32)
        seen = finite_range(values)
        if seen is not None:
            self._add(count_bins(values, self.mantissa_bits), *seen)
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale (float32 ``[1]``) and zero point (``[1]``) of the range with the least squared
        error; 1 and 0, warned, before any data.
        """
        low, high = self.min_val, self.max_val
        if self.bin_key.numel() > 0 and bool(self.bin_low.min() < self.bin_high.max()):
            low, high = best_range(self.state, self.quant_range, self.eps)
        return self._calculate_qparams(low, high)

    def reset_min_max_vals(self) -> None:
        """Forget everything."""
        self.min_val.fill_(float("inf"))
        self.max_val.fill_(float("-inf"))
        for name in _BUFFERS:
            setattr(self, name, getattr(self, name).new_empty(0))

    def _add(self, bins: Bins, low: Tensor, high: Tensor) -> None:
        for name, value in zip(_BUFFERS, merge_bins(self.state, bins), strict=True):
            setattr(self, name, value)
        self.min_val.copy_(torch.minimum(self.min_val, low))
        self.max_val.copy_(torch.maximum(self.max_val, high))

    def _merge_settings(self) -> dict[str, Any]:
        return {**super()._merge_settings(), "bins": self.bins}

    def _absorb(self, other: HistogramObserver) -> None:
        self._add(other.state, other.min_val, other.max_val)

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}, values={self.bin_count.sum()}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """The buffers take the length of what is loaded."""
        for name in _BUFFERS:
            if prefix + name in state_dict:
                shape = state_dict[prefix + name].shape
                setattr(self, name, getattr(self, name).new_empty(shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)
