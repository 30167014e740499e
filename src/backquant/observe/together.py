"""The qparams of many histograms at once: the same bits, in a third of the time.

A converted model has one observer for each of its activations; of each the values that wait are put into
bins, and a range is searched. Both are some hundred operations on some hundred numbers, whose time is
that of calling them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backquant.dtypes import affine_qparams, array_qparams
from backquant.observe.histogram import HistogramObserver
from backquant.observe.histogram_grid import Array, Bins, Spread, bin_places
from backquant.observe.histogram_search import best_ranges
from backquant.observe.minmax import PerChannelMinMaxObserver
from backquant.observe.protocol import qparam_dict

_FEW = 1 << 12  # values that wait in an observer; more are better put into a table of bins
_PART = 64  # observers whose values are sorted together


def calculate_together(observers: Iterable[Any]) -> dict[int, tuple[Tensor, Tensor]]:
    """What ``calculate_qparams()`` of each histogram observer returns, by the ``id`` of the observer.

    Left out are observers of other kinds and histograms of one value or none, of PyTorch, or on another
    device than the CPU.

    >>> one, other = HistogramObserver(), HistogramObserver()
    >>> _ = one(torch.linspace(0, 2.55, 1000)), other(torch.linspace(-1, 1, 1000))
    >>> found = calculate_together([one, other, torch.nn.Identity()])
    >>> found[id(one)] == one.calculate_qparams(), len(found)
    (True, 2)
    """
    alike: dict[Any, list[HistogramObserver]] = {}
    for observer in observers:
        if type(observer) is HistogramObserver and _is_here(observer):
            key = observer.quant_range, observer.eps.item(), observer.mantissa_bits
            alike.setdefault(key, []).append(observer)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for (target, eps, mantissa_bits), same in alike.items():
        _settle(same, mantissa_bits)
        ranges = best_ranges(list(_spreads(same, mantissa_bits)), target, eps)
        scale, zero_point = array_qparams(ranges[:, 0], ranges[:, 1], target, eps)
        integer = np.int64 if target.is_symmetric else np.int32
        scales = torch.from_numpy(scale).split(1)
        zero_points = torch.from_numpy(zero_point.astype(integer)).split(1)
        pairs = zip(scales, zero_points, strict=True)
        found.update(zip(map(id, same), pairs, strict=True))
    return found


class CalculatedOnce:
    """``calculate_together`` of observers that measure nothing more: asked again, it gives what it gave.

    >>> calculate, observer = CalculatedOnce(), HistogramObserver()
    >>> _ = observer(torch.linspace(0, 2.55, 1000))
    >>> calculate([observer])[id(observer)] is calculate([observer])[id(observer)]
    True
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, Any] = {}  # also keeps them, so that no other gets their id

    def __call__(self, observers: Iterable[Any]) -> dict[int, tuple[Tensor, Tensor]]:
        asked = {id(observer): observer for observer in observers}
        new = {key: observer for key, observer in asked.items() if key not in self._seen}
        self._found |= calculate_together(new.values())
        self._seen |= new
        return {key: self._found[key] for key in asked if key in self._found}


def _is_here(observer: HistogramObserver) -> bool:
    low, high = observer.min_val, observer.max_val
    counted_here = low.device.type == "cpu" and not observer.is_of_torch
    return counted_here and low.item() < high.item()


def _settle(observers: Sequence[HistogramObserver], mantissa_bits: int) -> None:
    """Put the values that wait into bins."""
    waiting = [observer for observer in observers if observer._waiting]
    few = [observer for observer in waiting if observer._number_waiting <= _FEW]
    for start in range(0, len(few), _PART):
        _settle_sorted(few[start : start + _PART], mantissa_bits)
    for observer in waiting:
        observer._settle()


def _settle_sorted(observers: Sequence[HistogramObserver], mantissa_bits: int) -> None:
    """Put values into bins by sorting those of all observers by observer and bin."""
    parts = [(i, part) for i, o in enumerate(observers) for part in o._waiting]
    values = np.concatenate([part.values.numpy() for _, part in parts])
    lengths = [part.values.numel() for _, part in parts]
    times = np.repeat(np.array([part.times for _, part in parts]), lengths)
    key, position, finite = bin_places(values, mantissa_bits)
    owner = np.repeat(np.array([i for i, _ in parts]), lengths)
    known = [observer._bins() for observer in observers]
    owners = np.repeat(np.arange(len(known)), [len(bins.key) for bins in known])
    place = np.concatenate(((owner << 32) + key, (owners << 32) + _joined(known, 0)))
    kept = np.flatnonzero(np.concatenate((finite, np.ones(len(owners), bool))))
    kept = kept[_order(place[kept])]
    place = place[kept]
    starts = np.flatnonzero(np.concatenate(([True], place[1:] != place[:-1])))
    moments = (times, times * position, times * position * position)
    added = (np.concatenate((m, _joined(known, i))) for i, m in enumerate(moments, 1))
    sums = [np.add.reduceat(moment[kept], starts) for moment in added]
    place = place[starts]
    ends = np.searchsorted(place, (np.arange(len(observers) + 1) << 32) - (1 << 31))
    keys = (place - ((place + (1 << 31)) >> 32 << 32)).astype(np.int32)
    for observer, start, stop in zip(observers, ends[:-1], ends[1:], strict=True):
        columns = (column[start:stop].copy() for column in (keys, *sums))
        observer._set_bins(Bins(*map(torch.from_numpy, columns)))
        observer._forget_waiting()


def _order(place: Array) -> Array:
    """The order of integers that leave room for their index. Sorting them is ten times faster than
    ``argsort``.
    """
    bits = len(place).bit_length()
    numbered = (place << bits) | np.arange(len(place))
    numbered.sort()
    found: Array = numbered & ((1 << bits) - 1)
    return found


def _joined(known: Sequence[Bins], part: int) -> Array:
    return np.concatenate([bins[part].numpy() for bins in known]).astype(np.int64)


def _spreads(observers: Sequence[HistogramObserver], mantissa_bits: int) -> Iterator[Spread]:
    """Where the values of each lie."""
    for start in range(0, len(observers), _PART):
        some = observers[start : start + _PART]
        known = [observer._bins() for observer in some]
        joined = Bins(*(torch.cat(columns) for columns in zip(*known, strict=True)))
        lower, upper, number = joined.spread(mantissa_bits, -np.inf, np.inf)
        stop = 0
        for observer, bins in zip(some, known, strict=True):
            own = slice(stop, stop := stop + len(bins.key))
            low, high = observer.min_val.item(), observer.max_val.item()
            lower[own], upper[own] = lower[own].clip(low, high), upper[own].clip(low, high)
            lower[own.start], upper[stop - 1] = low, high
            yield Spread(lower[own], upper[own], number[own])


# The qparams of many small weights at once: the same bits, in a fraction of the time.
#
# To look at one weight takes some thirty calls of torch, whatever its size.

_SMALL = 1 << 14  # values of a weight; of larger ones calling is the smaller part
_VALUES_AT_ONCE = 1 << 20  # values that are looked at together


def weights_together(
    make_observer: Callable[[], Any], weights: Iterable[Tensor]
) -> dict[int, dict[str, Any]]:
    """What ``qparam_dict`` gives of an observer that saw one weight, by the ``id`` of the weight.

    Left out are weights that are large, alone of their size, not float32, not on the CPU or not
    finite; and all of them when ``make_observer`` makes no ``PerChannelMinMaxObserver`` over the first axis.

    >>> one, other, alone = torch.ones(2, 3), torch.zeros(2, 3), torch.ones(5, 5)
    >>> found = weights_together(PerChannelMinMaxObserver, [one, other, alone])
    >>> len(found), found[id(one)]["scale"]
    (2, tensor([0.0039, 0.0039]))
    """
    alike: dict[tuple[int, int], dict[int, Tensor]] = {}
    for weight in weights:
        if _is_small(weight):
            alike.setdefault((len(weight), weight.numel()), {})[id(weight)] = weight
    several = {size: each for size, each in alike.items() if len(each) > 1}
    observer = make_observer() if several else None
    if type(observer) is not PerChannelMinMaxObserver or observer.ch_axis != 0:
        return {}
    if observer.min_val.dtype != torch.float32 or observer.min_val.device.type != "cpu":
        return {}
    found: dict[int, dict[str, Any]] = {}
    for (_, number), each in several.items():
        names, step = list(each), max(1, _VALUES_AT_ONCE // number)
        for start in range(0, len(names), step):
            part = names[start : start + step]
            found |= _measured(observer, {name: each[name] for name in part})
    return found


def _is_small(weight: Tensor) -> bool:
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and weight.dim() > 1 and 0 < weight.numel() <= _SMALL


def _measured(
    observer: PerChannelMinMaxObserver, weights: dict[int, Tensor]
) -> dict[int, dict[str, Any]]:
    """The qparams of weights that have the same number of channels and of values."""
    values = torch.stack([weight.detach().reshape(len(weight), -1) for weight in weights.values()])
    low, high = values.amin(2), values.amax(2)
    if not bool(torch.isfinite(high - low).all()):
        return {}
    qparams = affine_qparams(low.view(-1), high.view(-1), observer.quant_range, observer.eps)
    scales, zero_points = (each.view(low.shape).unbind() for each in qparams)
    return {
        name: qparam_dict(observer, (scale.clone(), zero_point.clone()))
        for name, scale, zero_point in zip(weights, scales, zero_points, strict=True)
    }
