"""The first batch of a calibration set, without losing it from an iterator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

__all__ = ["first_batch"]


class _Rejoined:
    """An iterator with its first batch put back; as long as the original said it is."""

    def __init__(self, first: Any, rest: Iterator[Any]) -> None:
        self._batches = chain([first], rest)

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def first_batch(example_inputs: Any, calibration: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Example inputs (the first batch where none are given) and a set that still holds every batch.

    Nothing is taken from a set that is no iterable or is empty: calibration refuses it by name.

    >>> example, batches = first_batch(None, iter([1, 2]))
    >>> example, list(batches)
    (1, [1, 2])
    """
    if example_inputs is not None or not isinstance(calibration, Iterable):
        return example_inputs, calibration
    iterator = iter(calibration)
    for first in iterator:
        again = calibration if iterator is not calibration else _Rejoined(first, iterator)
        return first, again
    return None, calibration
