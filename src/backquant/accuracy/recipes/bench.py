"""What the steps of a recipe work on: batches held in memory, the outputs of the float model for them, and
the error of a draft.

With two batches or more, the last quarter of them (at least one) is held, and steps fit on the others. What
is kept loses less on those that are held, and on all of them by more than samples differ by chance. The held
ones alone are few: where outputs are probabilities two or three samples make most of the error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backquant.accuracy.figures import decibels
from backquant.accuracy.outputs import FloatOutputs
from backquant.accuracy.recipes.draft import Change, Draft, Together
from backquant.accuracy.rounding import gram
from backquant.accuracy.twin import Twin, Walk
from backquant.calibrate.batches import samples_of, values_in
from backquant.calibrate.group import ALONE, Ranks, held_by_all
from backquant.prepare import unobserved

if TYPE_CHECKING:
    from backquant.accuracy.recipes.draft import Layer


# What layers read in a quantized model, summed over all batches, and held for the steps that come after.

_EACH, _LEAST = 16, 8192
_BYTES = 128 << 20  # of matrices that are held


@dataclass
class Read:
    """What a layer reads: the mean of ``x x^T``, float32 ``(groups, columns, columns)``, and that of each
    channel, in float64; sums until ``mean`` is called. ``most``: positions of a batch that the first is of.
    """

    most: int
    gram: Any = 0.0
    means: Any = 0.0
    positions: int = 0
    values: int = 0

    @classmethod
    def over(cls, layer: Layer, batches: int) -> Read:
        """For so many batches: of many positions, ``_EACH`` for each column and ``_LEAST`` at least."""
        wanted = max(_LEAST, _EACH * layer.inputs)
        return cls(-(-wanted // max(batches, 1)))

    def add(self, layer: Layer, x: Tensor) -> None:
        """One more batch of inputs."""
        found, count = gram(layer.float_part, x, self.most)
        by_channel = x.movedim(1 - layer.weight.dim(), 0).unsqueeze(-1).flatten(1)
        self.gram, self.positions = self.gram + found, self.positions + count
        self.means = self.means + by_channel.double().sum(1)
        self.values += by_channel.shape[1]

    def mean(self) -> Read:
        """The means of the sums."""
        return Read(self.most, self.gram / max(self.positions, 1), self.means / max(self.values, 1))


class HeldReads:
    """Those of one draft, as many as fit."""

    def __init__(self) -> None:
        self._draft: Draft | None = None
        self._found: dict[str, Read] = {}
        self._room = _BYTES

    def of(self, draft: Draft) -> dict[str, Read]:
        """What is held for ``draft``, by path of the layer; of another one nothing is held any more."""
        if self._draft is not draft:
            self._draft, self._room = draft, _BYTES
            self._found.clear()
        return self._found

    def hold(self, path: str, read: Read) -> None:
        """Hold one that the layer at ``path`` has, if there is room."""
        if path not in self._found and read.gram.nbytes <= self._room:
            self._room -= read.gram.nbytes
            self._found[path] = read


#: Batches that are held; more add little to what sums over them say.
MOST_BATCHES = 64

#: Samples that steps fit and judge on, where a recipe says nothing else.
ENOUGH_SAMPLES = 64
_VALUES, _FEWEST = (
    125_000,
    4,
)  # for each of these samples (a picture of 224 by 224 has 150,528); batches
_SAMPLES = 8  # whose differences say something
_TRIALS = 8


@dataclass(frozen=True)
class Losses:
    """What each sample adds to the relative error power of the outputs: of the batches that are held, and of
    those that steps fit on (none where these are the same).

    >>> Losses(torch.ones(1), torch.full((3,), 0.5)).every
    tensor([0.2500, 0.3750, 0.3750, 0.3750])
    """

    held: torch.Tensor
    fitted: torch.Tensor

    @property
    def total(self) -> float:
        """The relative error power of all batches."""
        return float(self.every.sum())

    @property
    def every(self) -> torch.Tensor:
        """Of all samples; the relative errors of the two parts count by their numbers of samples."""
        count = len(self.held) + len(self.fitted)
        parts = (part * (len(part) / max(count, 1)) for part in (self.held, self.fitted))
        return torch.cat(list(parts))


class Bench:
    """The data and the float outputs for one model.

    In a process group all ranks hold the same data, and divide the batches on which a draft is judged.
    ``most_inputs``, ``samples``: see ``Recipe``.
    """

    def __init__(
        self,
        draft: Draft,
        batches: Iterable[Any],
        ranks: Ranks = ALONE,
        most_inputs: int | None = None,
        samples: int = ENOUGH_SAMPLES,
    ) -> None:
        self.ranks, self.most_inputs, self.reads = ranks, most_inputs, HeldReads()
        every = held_by_all(ranks, enough(batches, samples), MOST_BATCHES)
        self.held = held = list(enough(every, samples))
        last = max(1, len(held) // 4) if len(held) > 1 else 0
        self.fitting = held[: len(held) - last]
        self.judging = held[len(held) - last :] or held
        floating = unobserved(draft.prepared)
        self._held = FloatOutputs(floating, self.judging, ranks)
        self._fitted = FloatOutputs(floating, self.fitting if last else [], ranks)

    def losses(self, draft: Draft) -> Losses:
        """The output error of the reference model of ``draft``."""
        reference = draft.reference()
        return Losses(self._of(self._held, reference), self._of(self._fitted, reference))

    def _of(self, outputs: FloatOutputs, reference: nn.Module) -> torch.Tensor:
        return outputs.losses(reference, "judging a recipe")

    def _tried(self, draft: Draft, before: Losses) -> Losses | None:
        """The losses of ``draft`` where they are less than ``before``."""
        reference = draft.reference()
        held = self._of(self._held, reference)
        if not float(held.sum()) < float(before.held.sum()):
            return None
        found = Losses(held, self._of(self._fitted, reference))
        return found if helps(before.every, found.every) else None

    def loss(self, draft: Draft) -> float:
        """The sum of ``losses``."""
        return self.losses(draft).total

    def sqnr(self, draft: Draft) -> float:
        """``loss`` as a signal-to-quantization-noise ratio in dB."""
        return decibels(self.loss(draft))

    def walks(
        self, twin: Twin, quantized: Callable[[int], bool], batches: Sequence[Any] | None = None
    ) -> Iterator[Walk]:
        """A walk over each batch to fit on, or of ``batches``."""
        for index, batch in enumerate(self.fitting if batches is None else batches):
            yield Walk(twin, twin.inputs(batch, index), quantized)

    def kept(
        self, draft: Draft, changes: Sequence[Change | Together], before: Losses
    ) -> tuple[Draft, Losses, int]:
        """``draft`` with those of ``changes`` that lower its error, the errors it has then, and how many
        changes that are. ``before``: the errors without them.

        All changes are tried together; where that does not help, each half is tried by itself, then each
        quarter, and so on, with at most ``_TRIALS`` trials.
        """
        waiting = deque([list(map(_together, changes))])
        count = 0
        for _ in range(_TRIALS):
            some = waiting.popleft() if waiting else []
            if not some:
                break
            tried = draft.changed(change for together in some for change in together)
            losses = self._tried(tried, before)
            if losses is not None:
                draft, before, count = tried, losses, count + len(some)
            elif len(some) > 1:
                middle = len(some) // 2
                waiting += some[:middle], some[middle:]
        return draft, before, count


def _together(change: Change | Together) -> Together:
    return (change,) if isinstance(change, Change) else change


def enough(batches: Iterable[Any], samples: int = ENOUGH_SAMPLES) -> Iterator[Any]:
    """The first of ``batches``: as many as hold ``samples`` and 125,000 values for each of these, 4 at least.

    >>> len(list(enough([torch.ones(1).expand(32, 1_000_000)] * 9)))
    4
    >>> len(list(enough([torch.ones(1).expand(8, 1_000_000)] * 9)))
    8
    >>> len(list(enough([torch.ones(8, 10)] * 9)))
    9
    >>> len(list(enough([torch.ones(1).expand(4, 1_000_000)] * 9, samples=16)))
    4
    """
    found = values = 0
    for count, batch in enumerate(batches, 1):
        yield batch
        found, values = found + samples_of(batch), values + values_in(batch)
        if found >= samples and values >= samples * _VALUES and count >= _FEWEST:
            return


def helps(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether samples lose less on the whole, and by more than they differ by chance: than the standard error
    of the sum. Of less than ``_SAMPLES`` the sum alone is asked.

    >>> before = torch.full((16,), 0.1)
    >>> helps(before, before * 0.99), helps(before, before)
    (True, False)
    >>> one = before.clone()
    >>> one[0] = 0.01  # of one sample alone
    >>> one[1:] += 0.005
    >>> helps(before, one)
    False
    """
    gained = (before - after).double()
    total = float(gained.sum())
    if not total > 0:
        return False
    count = len(gained)
    return count < _SAMPLES or total > float(gained.std()) * count**0.5
