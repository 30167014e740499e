"""What an error is measured in: sums over batches, from which SQNR, cosine and the like are calculated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from backquant.errors import BackquantError, UsageError, first_line
from backquant.graph.interception import user_line

#: Of the histograms that a report draws.
BINS = 64


@dataclass
class ErrorSums:
    """Sums over all values that were added; float64, so that millions of values can be summed.

    >>> sums = ErrorSums()
    >>> sums.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    >>> round(sums.sqnr, 1), round(sums.cosine, 4), sums.largest
    (20.0, 0.9985, 0.5)
    """

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    power: float = 0.0
    largest: float = 0.0
    values: int = 0

    def add(self, wanted: torch.Tensor, found: torch.Tensor) -> None:
        """Count two tensors of one shape. Where ``wanted`` is not finite nothing is counted; where ``found``
        alone is not, the error is infinite.

        >>> sums = ErrorSums()
        >>> sums.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]))
        >>> sums.sqnr, sums.largest
        (-inf, inf)
        """
        one, two = wanted.detach().flatten().double(), found.detach().flatten().double()
        expected = torch.isfinite(one)
        finite = expected & torch.isfinite(two)
        if not bool(finite.all()):
            if bool((expected & ~finite).any()):
                self.noise = self.largest = math.inf
            one, two = one[finite], two[finite]
        if not one.numel():
            return
        error = two - one
        self.signal += float(one @ one)
        self.noise += float(error @ error)
        self.product += float(one @ two)
        self.power += float(two @ two)
        self.largest = max(self.largest, float(error.abs().max()))
        self.values += one.numel()

    def merge(self, more: ErrorSums) -> None:
        """Count what ``more`` has counted."""
        self.signal += more.signal
        self.noise += more.noise
        self.product += more.product
        self.power += more.power
        self.largest = max(self.largest, more.largest)
        self.values += more.values

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise, in dB; infinite where there is no error."""
        return decibels(self.loss)

    @property
    def loss(self) -> float:
        """Power of the error by that of the signal."""
        if not self.noise:
            return 0.0
        return self.noise / self.signal if self.signal else math.inf

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the two; 1 where both are zero."""
        length = math.sqrt(self.signal * self.power)
        return self.product / length if length else float(self.signal == self.power)


def decibels(loss: float) -> float:
    """The SQNR of a relative error power.

    >>> decibels(0.01), decibels(0.0)
    (20.0, inf)
    """
    if loss <= 0:
        return math.inf
    return -math.inf if math.isinf(loss) else -10 * math.log10(loss)


def float_tensors(output: Any) -> list[torch.Tensor]:
    """The floating point tensors of what a model returns, in order.

    >>> [t.shape for t in float_tensors({"a": torch.ones(2), "n": 3})]
    [torch.Size([2])]
    """
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.numel()]


#: -40 dB: what is larger, or infinite, is no worse for whoever chooses.
MOST_LOSS = 1e4


def bounded_loss(sums: list[ErrorSums]) -> float:
    """``loss_of``, as a finite number, with which sums and programmes can be made.

    >>> bounded_loss([ErrorSums(signal=1, noise=math.inf)])
    10000.0
    """
    return min(loss_of(sums), MOST_LOSS)


def loss_of(sums: list[ErrorSums]) -> float:
    """The relative error power of several outputs: their mean, so that a small output counts as a large.

    >>> loss_of([ErrorSums(signal=1, noise=0.5), ErrorSums(signal=100, noise=1)])
    0.255
    """
    return sum(each.loss for each in sums) / len(sums) if sums else 0.0


def add_errors(
    sums: list[ErrorSums], wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> None:
    """Count the tensors of one output in ``sums``, which has one entry for each."""
    for position, (one, two) in enumerate(zip(wanted, found, strict=True)):
        if position == len(sums):
            sums.append(ErrorSums())
        sums[position].add(one, two)


def merge_errors(sums: list[ErrorSums], more: Sequence[ErrorSums]) -> None:
    """Count in ``sums`` what ``more`` has counted: the same bits as if it had been counted there."""
    for position, each in enumerate(more):
        if position == len(sums):
            sums.append(ErrorSums())
        sums[position].merge(each)


@dataclass
class Histogram:
    """Counts of values in ``BINS`` equal bins from ``low`` to ``high``; what lies outside is in the end bins.

    ``least`` and ``most`` are the extremes. The bins are those of the first tensor, widened to what the
    quantized range holds.

    >>> counted = Histogram()
    >>> counted.add(torch.tensor([-1.0, 1.0]), (-2.0, 2.0))
    >>> counted.low, counted.high, sum(counted.counts), counted.least
    (-2.0, 2.0, 2, -1.0)
    """

    low: float = 0.0
    high: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    counts: list[int] = field(default_factory=list)

    def add(self, x: torch.Tensor, bounds: tuple[float, float] | None = None) -> None:
        """Count a tensor; ``bounds``: what its quantized form can hold."""
        x = x.detach().flatten().float()
        x = x[torch.isfinite(x)]
        if not x.numel():
            return
        low, high = float(x.min()), float(x.max())
        self.least, self.most = min(self.least, low), max(self.most, high)
        if not self.counts:
            ends = [low, high, *(bounds or ())]
            self.low, self.high = min(ends), max(ends)
            if self.low == self.high:
                self.high = self.low + 1.0
            self.counts = [0] * BINS
        found = torch.histc(x.clamp(self.low, self.high), BINS, self.low, self.high)
        self.counts = [a + int(b) for a, b in zip(self.counts, found.tolist(), strict=True)]

    def bars(self) -> Iterator[float]:
        """Heights between 0 and 1, on a logarithmic scale.

        >>> list(Histogram(counts=[0, 10]).bars())
        [0.0, 1.0]
        """
        top = math.log1p(max(self.counts, default=0)) or 1.0
        yield from (round(math.log1p(count) / top, 3) for count in self.counts)


def decibel_text(value: float) -> str:
    """An SQNR as people read it.

    >>> decibel_text(21.234), decibel_text(-0.01), decibel_text(float("inf"))
    ('21.2 dB', '0.0 dB', 'exact')
    """
    return "exact" if math.isinf(value) and value > 0 else f"{round(value, 1) + 0.0:.1f} dB"


_BEST, _WORST = 50.0, 10.0  # dB: from no colour to the full one

#: What the colours of ``heat`` mean.
SCALE = "none at 50 dB and more, full at 10 dB and less"


def heat(sqnr: float) -> float:
    """From 0 (no error to speak of) to 1.

    >>> heat(60.0), heat(30.0), heat(-3.0), heat(-math.inf)
    (0.0, 0.5, 1.0, 1.0)
    """
    return round(min(1.0, max(0.0, (_BEST - sqnr) / (_BEST - _WORST))), 3)


def batch_count(count: int) -> str:
    """How many batches, in words.

    >>> batch_count(1), batch_count(2)
    ('1 batch', '2 batches')
    """
    return f"{count} batch" + ("" if count == 1 else "es")


# The user's own figure of a model.

Metric = Callable[[nn.Module], float]
_FIX = "metric=lambda model: accuracy(model, loader)   # a number that is finite"
_WORST_VALUE = (
    "a metric that is finite for any model: the worst value where nothing can be measured"
)


def measured_metric(metric: Metric, model: nn.Module, which: str) -> float:
    """What ``metric`` says of ``model``. Raises ``UsageError`` where it raises, or gives no finite number.

    >>> measured_metric(lambda model: model.p, nn.Dropout(0.25), "the float model")
    0.25
    """
    where = f"metric={getattr(metric, '__name__', metric)!s}, on {which}"
    try:
        with torch.no_grad():
            given = metric(model)
    except BackquantError:
        raise
    except Exception as error:
        what = f"the metric raised {type(error).__name__}: {first_line(error)}"
        line = user_line(error)
        place = f"{where}, {line}" if line else where
        raise UsageError(what, where=place, fix=_FIX) from error
    value = _number(given)
    if value is None:
        what = f"the metric gave {_shown(given)}, which is no number"
        raise UsageError(what, where=where, fix=_FIX)
    if not math.isfinite(value):
        raise UsageError(f"the metric is {value}", where=where, fix=_WORST_VALUE)
    return value


def _number(given: Any) -> float | None:
    """A number, or a tensor or array that holds one; ``None`` for anything else.

    >>> _number(torch.tensor([2])), _number("2"), _number(None)
    (2.0, None, None)
    """
    if isinstance(given, str | bytes):
        return None
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shown(given: Any) -> str:
    if given is None:
        return "None (a function without return?)"
    if isinstance(given, torch.Tensor):
        return f"a tensor of {given.numel()} values"
    return f"a {type(given).__name__}"
