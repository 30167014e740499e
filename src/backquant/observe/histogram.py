"""HistogramObserver: the range that loses least, found on exactly mergeable integer counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from backquant.dtypes import array_qparams
from backquant.errors import CalibrationError, ConfigError
from backquant.native import library
from backquant.native import library as measuring
from backquant.observe.base import EPS, UniformQuantizationObserverBase
from backquant.observe.histogram_grid import Array, Bins, Counted, add_to_bins, merge_bins
from backquant.observe.histogram_search import best_range
from backquant.observe.minmax import check_per_tensor, check_reduced_symmetric, finite_range

# What HistogramObserver takes from a tensor: its exact extremes and the values to be counted.
#
# 1. Up to ``EVERY_VALUE`` values are all counted, once each.
# 2. Of more, the tails are counted exactly and the bulk by every n-th value:
#
#    a. the tensor is read as a table, whose columns are put into 512 groups. Of the maxima of the
#       groups the 16th (one more for each 8,192 values, within ``TAIL``) in order is the limit: what lies
#       above counts once each. So it is with the minima below zero. 8 bits clip a normal distribution
#       where one of 10,000 values lies outside.
#    b. of the rest, every n-th value (in memory order) counts n times. n shares no factor with the
#       size, so that every channel and position has its turn.
#
#    A large value among them is replaced by NaN, which no bin holds.
#
# What is taken depends on the values, the shape and the memory order of the tensor alone.
#
# On the CPU by the library of kernels, or by numpy's functions where it is not installed: a network has a
# hundred tensors of some ten thousand values, of which calling torch's takes longer than reading them.

EVERY_VALUE = 1 << 12
TAIL = (16, 128)
_COLUMNS = (1 << 9, 1 << 11)
_GROUPS = 1 << 9
_BULK = (1 << 11, 1 << 13)
_NAN = np.float32(math.nan)


class Sampled(NamedTuple):
    """``low`` and ``high``: the extremes; (inf, -inf) when no value is finite.

    ``ignored``: how many values are not finite.
    """

    low: float
    high: float
    ignored: int
    counted: tuple[Counted, ...]


class _Cut(NamedTuple):
    """How a tensor of some size is cut: a table of ``columns``, ``inside`` of the values in all; of
    the groups of columns ``tail`` for the tail; every ``step``-th value for the bulk.
    """

    columns: int
    inside: int
    tail: int
    step: int


def sample_values(x: Tensor) -> Sampled:
    """The values of ``x`` (any shape, any real dtype) to be counted; copies, no views.

    >>> sample_values(torch.tensor([[1.0, -2.0]])).counted
    (Counted(values=tensor([ 1., -2.]), times=1),)
    >>> taken = sample_values(torch.arange(100_000.0))
    >>> [(len(part.values), part.times) for part in taken.counted]
    [(241, 1), (3031, 33)]
    """
    flat = _in_memory_order(x)
    if flat.dtype != torch.float32:
        flat = flat.to(torch.float32)
    number = flat.numel()
    if number > EVERY_VALUE:
        taken = _of_many_on_cpu(flat) if _is_plain(flat) else _of_many_elsewhere(flat)
    else:
        taken = _of_few(flat.numpy()) if number and _is_plain(flat) else None
    return _of_finite_values(flat) if taken is None else taken


def _is_plain(flat: Tensor) -> bool:
    """Whether numpy can read the memory."""
    return flat.device.type == "cpu" and not flat.is_neg()


def _in_memory_order(x: Tensor) -> Tensor:
    """``x`` as a vector, without a copy when its memory has no gaps."""
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.reshape(-1)


def _of_finite_values(flat: Tensor) -> Sampled:
    """Rule 1, for what is finite; what is left may be many, then rule 2."""
    lowest, highest, ignored = finite_range(flat)
    low, high = lowest.item(), highest.item()
    if not ignored:
        counted = (Counted(flat.clone(), 1),) if flat.numel() else ()
        return Sampled(low, high, 0, counted)
    kept = flat[torch.isfinite(flat)]
    if kept.numel() > EVERY_VALUE:
        return sample_values(kept)._replace(ignored=ignored)
    return Sampled(low, high, ignored, (Counted(kept, 1),) if kept.numel() else ())


def _of_few(flat: Array) -> Sampled | None:
    """Rule 1; None when a value is not finite."""
    low, high = float(np.minimum.reduce(flat)), float(np.maximum.reduce(flat))
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    return Sampled(low, high, 0, (Counted(torch.from_numpy(flat.copy()), 1),))


def _of_many_on_cpu(flat: Tensor) -> Sampled | None:
    """Rule 2; None when a value is not finite."""
    if not library.is_here():
        return _of_many(flat.numpy())
    size = flat.numel()
    columns, inside, tail, step = _cut(size)
    found = measuring.sampled(flat, (columns, inside, _GROUPS, tail, step), -(-size // step))
    if found is None:
        return None
    low, high, large, bulk = found
    return Sampled(low, high, 0, (Counted(large, 1), Counted(bulk, step)))


def _of_many(flat: Array) -> Sampled | None:
    """Rule 2; None when a value is not finite."""
    columns, inside, tail, step = _cut(flat.size)
    table = flat[:inside].reshape(-1, columns)
    tops, bottoms = np.maximum.reduce(table, 0), np.minimum.reduce(table, 0)
    low, high = float(np.minimum.reduce(bottoms)), float(np.maximum.reduce(tops))
    rest = flat[inside:]
    if rest.size:
        low = _least(low, float(np.minimum.reduce(rest)))
        high = -_least(-high, -float(np.maximum.reduce(rest)))
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    below = -math.inf if low >= 0 else -_limit(-bottoms, tail)
    limits = below, math.inf if high <= 0 else _limit(tops, tail)
    places = _outside(bottoms, tops, limits).nonzero()[0]
    large = table.take(places, 1).reshape(-1)
    if rest.size:
        large = np.concatenate((large, rest))
    large = large[_outside(large, large, limits)]
    bulk = flat[::step].copy()
    bulk[_outside(bulk, bulk, limits)] = _NAN
    counted = Counted(torch.from_numpy(large), 1), Counted(torch.from_numpy(bulk), step)
    return Sampled(low, high, 0, counted)


def _limit(tops: Array, tail: int) -> Any:
    """The ``tail``-th largest maximum of the groups of some columns."""
    groups = tops.size // _GROUPS
    tops = np.maximum.reduce(tops[: groups * _GROUPS].reshape(groups, _GROUPS), 0)
    tops.partition(_GROUPS - tail)
    return tops[_GROUPS - tail]


def _outside(low: Array, high: Array, limits: tuple[float, float]) -> Array:
    """Where ``low`` is below, or ``high`` above."""
    found: Array = high > limits[1]
    if limits[0] > -math.inf:
        found |= low < limits[0]
    return found


def _of_many_elsewhere(flat: Tensor) -> Sampled | None:
    """``_of_many`` for memory that numpy cannot read: the same values."""
    columns, inside, tail, step = _cut(flat.numel())
    table, rest = flat[:inside].view(-1, columns), flat[inside:]
    tops, bottoms = table.amax(0), table.amin(0)
    ends = torch.cat((rest, bottoms)).amin(), torch.cat((rest, tops)).amax()
    low, high = torch.stack(ends).tolist()
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    grouped = (each[: columns // _GROUPS * _GROUPS].view(-1, _GROUPS) for each in (-bottoms, tops))
    below, above = (each.amax(0).topk(tail).values[-1] for each in grouped)
    below = torch.full_like(below, -math.inf) if low >= 0 else -below
    above = torch.full_like(above, math.inf) if high <= 0 else above
    places = ((tops > above) | (bottoms < below)).nonzero().squeeze(1)
    large = torch.cat((table.index_select(1, places).view(-1), rest))
    large = large[(large > above) | (large < below)]
    bulk = flat[::step].clone()
    bulk.masked_fill_((bulk > above) | (bulk < below), math.nan)
    return Sampled(low, high, 0, (Counted(large, 1), Counted(bulk, step)))


def _least(one: float, two: float) -> float:
    """The smaller one; NaN if one of them is."""
    return one if math.isnan(one) or one < two else two


@lru_cache(maxsize=1024)
def _cut(number: int) -> _Cut:
    """Columns that divide ``number`` where there is such a number of about the wanted size."""
    columns = _between(_COLUMNS, 1 << (number >> 7).bit_length())
    wider = range(columns, 2 * columns + 1)
    columns = next((each for each in wider if number % each == 0), columns)
    step = -(-number // _between(_BULK, number >> 5))
    while math.gcd(step, number) != 1:
        step += 1
    return _Cut(columns, number // columns * columns, _between(TAIL, number >> 13), step)


def _between(limits: tuple[int, int], value: int) -> int:
    return min(max(limits), max(min(limits), value))


_BUFFERS = {
    "bin_key": torch.int32,
    "bin_count": torch.int64,
    "bin_first": torch.int64,
    "bin_second": torch.int64,
}
_EXTREMES = ("min_val", "max_val")
_OF_TORCH = "histogram"

#: The fewest bits of a mantissa that a grid tells apart, those of 2048 bins; fewer ``bins`` are read from it.
_LEAST_BITS = 7

# Values are put into bins when so many wait, or when someone looks.
_MOST_WAITING = 1 << 16


class HistogramObserver(UniformQuantizationObserverBase):
    """Counts values on a fixed grid and clips the range where that lowers the squared error.

    Arguments are those of PyTorch's class. ``bins`` sets the resolution: every power-of-two interval
    ``[2**e, 2**(e+1))`` of either sign is divided into ``bins / 16`` bins (rounded up to a power of
    two, 128 to 1024; with 128, each level of 8-bit data has a bin of its own). Their width is thus a
    power of two and their edges are multiples of it; the grid is the same for all observers.

    State: of every bin that is not empty its number (``bin_key``, int32 ``[k]``, ascending), its
    count (``bin_count``, int64), and the sums of the position in the bin and of its square
    (``bin_first``, ``bin_second``, int64), which tell where in the bin the values lie and how
    far apart; ``min_val`` and ``max_val`` (float32 ``[]``) are the extremes of all. Tensors of up to
    4,096 values are counted whole; of larger ones the extremes and tails are exact and the bulk is
    every n-th value, n times (``histogram_sample``). The state is a function of the multiset of
    values counted, so any order of batches, and any tree of merges, gives the same qparams bit for
    bit. Memory is bounded by the grid (65,280 bins of 28 bytes for 2048) and 65,536 values that wait
    to be put into bins; normal activations fill some thousand bins.

    ``histogram`` reads the state as PyTorch's attribute does: how many values lie in each of ``bins`` equal
    parts between ``min_val`` and ``max_val`` (float32 ``[bins]``); values of one bin of the grid are spread
    over the parts that it touches.

    NaN and infinite values are left out; ``ignored`` says how many there were.

    A ``state_dict`` of PyTorch's observer loads: its ``histogram`` stays as it is, and qparams are those of
    PyTorch (``histogram_of_torch``). It cannot be counted on: which values a bin held is not known.

    >>> observer = HistogramObserver()
    >>> _ = observer(torch.linspace(0, 2.55, 1000))
    >>> observer.calculate_qparams()
    (tensor([0.0100]), tensor([0], dtype=torch.int32))
    >>> observer.histogram.shape, int(observer.histogram.sum())
    (torch.Size([2048]), 1000)
    """

    # Buffers whose tensors are replaced, never written into: undoing a batch needs no copies of them.
    replaced_buffers = frozenset((*_BUFFERS, *_EXTREMES, "eps"))

    min_val: Tensor
    max_val: Tensor
    bin_key: Tensor
    bin_count: Tensor
    bin_first: Tensor
    bin_second: Tensor

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
        ends = (quant_min, quant_max)
        super().__init__(
            dtype, qscheme, reduce_range, *ends, factory_kwargs, eps, is_dynamic, **kwargs
        )
        made = torch.nn.factory_kwargs(factory_kwargs)
        self.bins = bins
        self.mantissa_bits = max(_LEAST_BITS, min(10, (max(bins, 1) - 1).bit_length() - 4))
        self.register_buffer("min_val", torch.tensor(float("inf"), **made))
        self.register_buffer("max_val", torch.tensor(float("-inf"), **made))
        self._buffers[_OF_TORCH] = None  # under this name the state is read, too
        for name, integer in _BUFFERS.items():
            self.register_buffer(name, torch.empty(0, dtype=integer, device=made.get("device")))
        check_reduced_symmetric(self)
        self._waiting: list[Counted] = []
        self._forget_waiting()

    def __getattr__(self, name: str) -> Any:
        """Buffers are no attributes in ``__dict__``, so that every look at the bins comes by here."""
        if name in _BUFFERS:
            self._settle()
        elif name in _EXTREMES:
            self._widen_by_waiting()
        elif name == _OF_TORCH and not self.is_of_torch:
            return self._evenly()
        return super().__getattr__(name)

    @property
    def state(self) -> Bins:
        """The bins that are not empty."""
        self._refuse_torchs()
        self._settle()
        return self._bins()

    def forward(self, x: Tensor) -> Tensor:
        """Count the values of ``x`` (any shape, any real dtype); returns ``x``."""
        self._refuse_torchs()
        low, high, ignored, counted = sample_values(x.detach() if x.requires_grad else x)
        if ignored:
            self.ignored += ignored
        if counted:
            self._wait(low, high, counted)
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale (float32 ``[1]``) and zero point (``[1]``) of the range with the least squared
        error; 1 and 0, warned, before any data.
        """
        low, high = self.min_val.item(), self.max_val.item()
        if not low < high:
            return self._calculate_qparams(self.min_val, self.max_val)
        theirs = self._buffers[_OF_TORCH]
        if theirs is not None:
            levels = 1 << torch.iinfo(self.dtype).bits
            return self._calculate_qparams(
                *torchs_range(theirs, self.min_val, self.max_val, levels)
            )
        target, eps = self.quant_range, self.eps.item()
        found = best_range(self.state.spread(self.mantissa_bits, low, high), target, eps)
        scale, zero_point = array_qparams(found[:1], found[1:], target, eps)
        dtype = torch.int64 if target.is_symmetric else torch.int32
        device = self.min_val.device
        return torch.from_numpy(scale).to(device), torch.from_numpy(zero_point).to(device, dtype)

    def reset_min_max_vals(self) -> None:
        """Forget everything."""
        self._buffers[_OF_TORCH] = None
        self._forget_waiting()
        low, high = self._extremes()
        self._set_extremes(low.new_tensor(math.inf), high.new_tensor(-math.inf))
        self._set_bins(Bins(*(self._buffers[name].new_empty(0) for name in _BUFFERS)))  # type: ignore[union-attr]

    def _refuse_torchs(self) -> None:
        if self.is_of_torch:
            raise CalibrationError(
                "this histogram was measured by torch.ao, whose bins say how many values they held, "
                "not which: nothing can be added to it",
                where="HistogramObserver",
                fix="backquant.convert_fx(prepared), as it is; or observer.reset_min_max_vals() for each "
                "observer, and calibrate anew",
            )

    def _evenly(self) -> Tensor:
        low, high = self.min_val.item(), self.max_val.item()
        if not low <= high:
            return torch.zeros(self.bins)
        spread = self.state.spread(self.mantissa_bits, low, high)
        return torch.from_numpy(spread.counts(self.bins, low, high)).to(self.min_val)

    @property
    def is_of_torch(self) -> bool:
        """Whether the histogram is one that PyTorch measured."""
        return self._buffers[_OF_TORCH] is not None

    def _bins(self) -> Bins:
        return Bins(*(self._buffers[name] for name in _BUFFERS))  # type: ignore[arg-type]

    def _set_bins(self, bins: Bins) -> None:
        self._buffers.update(zip(_BUFFERS, bins, strict=True))

    def _settle(self) -> None:
        """Put the values that wait into bins."""
        waiting = self.__dict__.get("_waiting")
        if waiting:
            self._widen_by_waiting()
            within = self._lowest_waiting, self._highest_waiting
            self._set_bins(add_to_bins(self._bins(), waiting, self.mantissa_bits, within))
            self._forget_waiting()

    def _wait(self, low: float, high: float, counted: Sequence[Counted]) -> None:
        own = self.__dict__  # a module's way to set attributes takes its time
        own["_waiting"] += counted
        own["_lowest_waiting"] = min(own["_lowest_waiting"], low)
        own["_highest_waiting"] = max(own["_highest_waiting"], high)
        for values, _ in counted:
            own["_number_waiting"] += values.numel()
        if own["_number_waiting"] >= _MOST_WAITING:
            self._settle()

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._number_waiting = 0
        self._lowest_waiting, self._highest_waiting = math.inf, -math.inf

    def _widen_by_waiting(self) -> None:
        """Let the extremes hold the values that wait; a second time changes nothing."""
        if self.__dict__.get("_waiting"):
            low, high = self._extremes()
            low, high = low.clamp(max=self._lowest_waiting), high.clamp(min=self._highest_waiting)
            self._set_extremes(low, high)

    def _extremes(self) -> tuple[Tensor, Tensor]:
        return self._buffers["min_val"], self._buffers["max_val"]  # type: ignore[return-value]

    def _set_extremes(self, low: Tensor, high: Tensor) -> None:
        self._buffers.update(zip(_EXTREMES, (low, high), strict=True))

    def _merge_settings(self) -> dict[str, Any]:
        return {**super()._merge_settings(), "bins": self.bins}

    def _absorb(self, other: HistogramObserver) -> None:
        self._set_bins(merge_bins(self.state, other.state))
        self._set_extremes(
            torch.minimum(self.min_val, other.min_val), torch.maximum(self.max_val, other.max_val)
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._settle()
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._settle()
        super()._save_to_state_dict(*args)

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}, values={self.bin_count.sum()}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """The buffers take the length of what is loaded; a histogram of PyTorch stands for the bins."""
        self._forget_waiting()
        theirs = state_dict.get(prefix + _OF_TORCH)
        self._buffers[_OF_TORCH] = None if theirs is None else torch.empty_like(theirs)
        if theirs is not None:
            state_dict.update(
                {prefix + name: getattr(self, name).new_empty(0) for name in _BUFFERS}
            )
        for name in _BUFFERS:
            if prefix + name in state_dict:
                shape = state_dict[prefix + name].shape
                setattr(self, name, getattr(self, name).new_empty(shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)


# The range that ``torch.ao``'s HistogramObserver takes of its histogram, which has bins of one width.
#
# Such a histogram says how many values a bin held, not which: its counts cannot be put on the grid of ours
# without a guess. So a loaded one is kept as it is, and read as PyTorch reads it: from both ends a bin is cut
# off after the other, always at the end where the least values go, until the error grows.
#
# The arithmetic is that of PyTorch, in float32 where it has tensors, so that the same bin is the last one.
_SHARE = 1e-5  # of the values, by which an end moves


def torchs_range(counts: Tensor, low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Both ends (float32 ``[]``), for ``levels`` integers.

    Args:
        counts: float32 ``[bins]``.
        low, high: the extremes (``[]``), the edges of the first and the last bin.

    >>> counts = torch.tensor([1e6, 0, 0, 0, 0, 0, 0, 1])
    >>> [end.item() for end in torchs_range(counts, torch.tensor(0.0), torch.tensor(8.0), 256)]
    [0.0, 1.0]
    """
    width = (high - low) / len(counts)
    sums = torch.cumsum(counts, 0).cpu().numpy()
    first, last = _kept_bins(sums, torch.sum(counts).item(), _error_of(counts, low, high, levels))
    return low + width * first, low + width * (last + 1)


def _kept_bins(
    sums: np.ndarray[tuple[int], np.dtype[np.float32]],
    total: float,
    error: Callable[[int, int], float],
) -> tuple[int, int]:
    """The first and the last bin of the range; ``sums``: of the counts up to each bin."""
    first, last, least = 0, len(sums) - 1, math.inf
    below, above = 0.0, 1.0  # the shares of values at which the ends are looked for
    while below < above:
        lower, upper = below + _SHARE, above - _SHARE
        left = first + int(np.searchsorted(sums[first:last], np.float32(lower * total), "left"))
        beyond = np.searchsorted(sums[first + 1 : last + 1], np.float32(upper * total), "right")
        right = first + int(beyond)
        if left - first > last - right:
            ends, below = (left, last), lower
        else:
            ends, above = (first, right), upper
        if ends == (first, last):
            continue
        found = error(*ends)
        if found > least:
            break
        (first, last), least = ends, found
    return first, last


def _error_of(
    counts: Tensor, low: Tensor, high: Tensor, levels: int
) -> Callable[[int, int], float]:
    """The squared error of a range of bins, values lying evenly in theirs."""
    width = (high.item() - low.item()) / len(counts)
    density, places = counts / width, torch.arange(len(counts), device=counts.device)

    def below(edge: Tensor | float) -> Tensor:
        cube = torch.as_tensor(edge, dtype=torch.float32)
        return cube * cube * cube

    def error(first: int, last: int) -> float:
        step = width * (last - first + 1) / levels
        if step == 0.0:
            return 0.0
        begin = (places - first) * width
        end = begin + width
        levels_of = [
            torch.div(edge, step, rounding_mode="floor").clamp(0, levels - 1)
            for edge in (begin, end)
        ]
        half = step / 2
        from_centre = begin - (levels_of[0] + 0.5) * step
        to_centre = end - (levels_of[1] * step + half)
        parts = torch.zeros_like(counts)
        parts += density * ((below(half) - below(from_centre)) / 3)
        whole = density * ((below(half) - below(-half)) / 3)
        parts += (levels_of[1] - levels_of[0] - 1) * whole
        parts += density * ((below(to_centre) - below(-half)) / 3)
        return parts.sum().item()

    return error
