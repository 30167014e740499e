"""The calibration set as people have it: a list, a loader, a stream without a length, an iterator.

1. Its length is asked for in one place, and need not be known (``count_of``).
2. An iterator comes once. What has to go over it again keeps its batches, up to ``MOST_BYTES``.
3. Of batches that hold labels, too, the model gets the first element (``inputs_of``).
4. A set that gives nothing when it is gone over again is refused: it was an iterator in disguise.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from backquant.errors import CalibrationError, InputError
from backquant.graph import as_arguments

MOST_BYTES = 2 << 30  #: of an iterator that has to be gone over again
_log = logging.getLogger(__name__)


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
    elif isinstance(calibration, str | bytes | os.PathLike):
        fix = f"{argument}=[batch]   # the command line reads files: backquant quantize --data FILE"
    elif isinstance(calibration, Iterable):
        return
    elif callable(calibration) and not hasattr(calibration, "__getitem__"):
        fix = f"pass what it returns: {argument}={_call_of(calibration)}"
    elif hasattr(calibration, "__getitem__"):
        fix = f"{argument}=torch.utils.data.DataLoader(dataset, batch_size=32)"
    else:
        fix = f"pass any iterable of batches: {argument}=[batch], or a DataLoader"
    raise CalibrationError(
        f"{_called(argument)} is a {kind}, not an iterable of batches", where=argument, fix=fix
    )


def _call_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return f"{name if name.isidentifier() else 'function'}()"


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
    kind = getattr(calibration, "kind", "") or type(calibration).__name__
    return CalibrationError(
        f"{_called(argument)} is empty"
        + (", or an iterator that was used up before" if used_up else ""),
        where=f"{argument}: {kind} without batches",
        fix=f"{argument}=[batch]   # a list, or a fresh iterator, with one batch at least",
    )


def kept_set(calibration: Any) -> Any:
    """A set that can be gone over again: a list of what comes only once. An iterator that gives nothing
    stays one, so that errors can say so.

    Raises ``CalibrationError`` for an iterator of more than ``MOST_BYTES``, or of no end.

    >>> kept_set(iter([1, 2])), kept_set(range(2))
    ([1, 2], range(0, 2))
    """
    if not isinstance(calibration, Iterator):
        return calibration
    kept, size = [], 0
    for batch in calibration:
        kept.append(batch)
        size += sum(leaf.nbytes for leaf in tree_leaves(batch) if hasattr(leaf, "nbytes"))
        if size > MOST_BYTES:
            raise CalibrationError(
                f"an iterator of more than {MOST_BYTES >> 30} GB has to be gone over more than once",
                where=f"a {type(calibration).__name__}, after {len(kept)} batches",
                fix="pass what starts anew each time, such as a DataLoader; or fewer batches: "
                "calibration=itertools.islice(batches, 32)",
            )
    return kept or calibration


def count_of(batches: Any) -> int | None:
    """How many batches a set has, where that is known: a loader of a stream has a ``len`` that raises.

    >>> class Stream(torch.utils.data.IterableDataset):
    ...     def __iter__(self):
    ...         return iter([1, 2])
    >>> count_of([1, 2]), count_of(iter([1, 2])), count_of(DataLoader(Stream()))
    (2, None, None)
    """
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


class _Once(Iterator[Any]):
    """An iterator, as the model takes its batches: rule 3. ``kind``: the class of what the user passed."""

    def __init__(self, batches: Iterator[Any], inputs: _Inputs, kind: str) -> None:
        self._batches, self.kind = map(inputs, batches), kind

    def __next__(self) -> Any:
        return next(self._batches)


class _Batches:
    """A set that starts anew each time, as the model takes its batches: rules 3 and 4."""

    def __init__(self, batches: Iterable[Any], inputs: _Inputs, argument: str) -> None:
        self._batches, self._inputs, self._argument = batches, inputs, argument
        self._gave = False

    def __len__(self) -> int:
        count = count_of(self._batches)
        if count is None:
            raise TypeError(f"the length of a {self.kind} is not known")
        return count

    @property
    def kind(self) -> str:
        """The class of what the user passed."""
        return type(self._batches).__name__

    def __iter__(self) -> Iterator[Any]:
        some = False
        for batch in self._batches:
            some = self._gave = True
            yield self._inputs(batch)
        if self._gave and not some:
            raise CalibrationError(
                f"{_called(self._argument)} gives no batches when it is gone over again",
                where=f"{self._argument}: {self.kind}",
                fix=f"an __iter__ that starts anew each time; or {self._argument}=list(batches)",
            )


class _Inputs:
    """Takes the inputs out of batches that hold labels, too, and says so once."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        self._signature = inspect.signature(model.forward)
        self._argument, self._was_said = argument, False

    def has_labels(self, batch: Any) -> bool:
        if not isinstance(batch, tuple | list) or hasattr(batch, "_fields") or len(batch) < 2:
            return False
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(batch[0])):
            return False
        return not self._fits(batch) and self._fits(batch[0])

    def check(self, batch: Any) -> None:
        """Refuse what holds no tensors, but arrays or names of files."""
        leaves = tree_leaves(batch)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return
        for leaf in leaves:
            if isinstance(leaf, np.ndarray | str | os.PathLike):
                is_array = isinstance(leaf, np.ndarray)
                each = "torch.from_numpy(batch)" if is_array else "load(batch)"
                raise InputError(
                    f"a batch is a tensor, or holds some, and no {type(leaf).__name__}",
                    where=f"{self._argument}: {type(batch).__name__}",
                    fix=f"{self._argument}=[{each} for batch in batches]",
                )

    def __call__(self, batch: Any) -> Any:
        self.check(batch)
        if not self.has_labels(batch):
            return batch
        if not self._was_said:
            self._was_said = True
            _log.warning(
                "%s: of each batch, which holds %d values, the model gets the first",
                *(self._argument, len(batch)),
            )
        return batch[0]

    def _fits(self, batch: Any) -> bool:
        args, kwargs = as_arguments(batch)
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True


def inputs_of(model: nn.Module, calibration: Any, argument: str = "calibration") -> Any:
    """``calibration``, or ``None``, with batches as ``model`` takes them: of (inputs, labels) the inputs.

    Raises ``CalibrationError`` for what is no set.

    >>> x = torch.ones(1)
    >>> inputs_of(nn.ReLU(), [(x, 2)]), list(inputs_of(nn.ReLU(), zip([x], [2])))
    ([tensor([1.])], [tensor([1.])])
    """
    if calibration is None:
        return None
    check_set(calibration, argument)
    if isinstance(calibration, _Once | _Batches | _Rejoined):
        return calibration
    inputs = _Inputs(model, argument)
    if isinstance(calibration, Iterator):
        return _Once(calibration, inputs, type(calibration).__name__)
    if isinstance(calibration, list | tuple):
        as_they_are = all(inputs(batch) is batch for batch in calibration[:1])
        return calibration if as_they_are else [inputs(batch) for batch in calibration]
    if isinstance(calibration, Sequence):
        return calibration
    again = iter(calibration) if not isinstance(calibration, DataLoader) else None
    if again is not None and again is iter(calibration):  # an iterator in disguise
        return _Once(again, inputs, type(calibration).__name__)
    return _Batches(calibration, inputs, argument)


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
