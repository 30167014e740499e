"""The calibration set: refused when it is none, and its first batch taken without losing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from backquant.errors import CalibrationError


class _Rejoined:
    """An iterator with its first batch put back."""

    def __init__(self, first: Any, rest: Iterator[Any]) -> None:
        self._batches = chain([first], rest)

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def check_set(calibration: Any, argument: str = "calibration") -> None:
    """Raise ``CalibrationError`` for what is no iterable of batches: one batch, a file's name, a data set.
    ``argument``: the name under which the user gave it, here and below."""
    kind = type(calibration).__name__
    if isinstance(calibration, torch.Tensor | Mapping):
        fix = f"pass a list of batches: {argument}=[batch]"
    elif isinstance(calibration, str | bytes):
        fix = "pass the batches themselves; the command line reads files: backquant quantize --data"
    elif isinstance(calibration, Iterable):
        return
    elif hasattr(calibration, "__getitem__"):
        fix = "torch.utils.data.DataLoader(dataset, batch_size=32) makes batches of a data set"
    else:
        fix = f"pass any iterable of batches: {argument}=[batch], or a DataLoader"
    raise CalibrationError(
        f"{_called(argument)} is a {kind}, not an iterable of batches", where=argument, fix=fix
    )


def samples_of(batch: Any) -> int:
    """How many samples a batch holds: the length of its first tensor, 1 where that has no axes.

    >>> samples_of({"x": torch.zeros(8, 3)}), samples_of(1)
    (8, 1)
    """
    first = next((one for one in tree_leaves(batch) if isinstance(one, torch.Tensor)), None)
    return max(1, len(first)) if first is not None and first.dim() else 1


def values_in(batch: Any) -> int:
    """How many values the tensors of a batch hold.

    >>> values_in({"x": torch.zeros(8, 3), "y": [torch.zeros(2)]})
    26
    """
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def check_some(done: int, calibration: Any, argument: str = "calibration") -> None:
    """Raise ``CalibrationError`` where no batch came."""
    if done == 0:
        raise _empty(calibration, argument, used_up=isinstance(calibration, Iterator))


def _called(argument: str) -> str:
    return "the calibration set" if argument == "calibration" else f"the set {argument!r}"


def _empty(calibration: Any, argument: str, used_up: bool) -> CalibrationError:
    return CalibrationError(
        f"{_called(argument)} is empty"
        + (", or an iterator that was used up before" if used_up else ""),
        where=f"{argument}: {type(calibration).__name__} without batches",
        fix=f"pass at least one batch, and a fresh iterator: {argument}=[batch]",
    )


def kept_set(calibration: Any) -> Any:
    """A set that can be gone over again: a list of what comes only once. An iterator that gives nothing
    stays one, so that errors can say so.

    >>> kept_set(iter([1, 2])), kept_set(range(2))
    ([1, 2], range(0, 2))
    """
    return list(calibration) or calibration if isinstance(calibration, Iterator) else calibration


def some_batches(calibration: Iterable[Any] | None, most: int) -> Iterable[Any]:
    """At most ``most`` batches, spread evenly where their number is known, of a set that can be gone over
    again; of others none.

    >>> some_batches(range(100), 4), list(some_batches(iter([1, 2]), 4))
    ([0, 25, 50, 75], [])
    """
    if calibration is None or isinstance(calibration, Iterator | _Rejoined):
        return []
    if isinstance(calibration, Sequence):
        count = len(calibration)
        picked = range(min(most, count))
        return [calibration[index * count // min(most, count)] for index in picked]
    return islice(calibration, most)


def first_batch(
    calibration: Iterable[Any], argument: str = "calibration"
) -> tuple[Any, Iterable[Any]]:
    """The first batch, and a set that still holds every batch.

    Raises ``CalibrationError`` when there is none.

    >>> example, batches = first_batch(iter([1, 2]))
    >>> example, list(batches)
    (1, [1, 2])
    """
    iterator = iter(calibration)
    for first in iterator:
        again = calibration if iterator is not calibration else _Rejoined(first, iterator)
        return first, again
    raise _empty(calibration, argument, used_up=iterator is calibration)
