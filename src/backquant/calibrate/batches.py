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
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from backquant.errors import CalibrationError, InputError, UsageError
from backquant.graph import as_arguments, check_inputs
from backquant.graph.devices import other_devices
from backquant.graph.example import inputs_of as named_inputs
from backquant.graph.example_call import ExampleCall
from backquant.graph.objects import fresh, tensors_of
from backquant.graph.settle import WritesParameterError, settle

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
        fix = f"{argument}=[{name_in_call(calibration) or 'batch'}]   # a list of batches"
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


def name_in_call(value: Any) -> str:
    """What the code that called backquant calls ``value``; empty where it has no name for it."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == "backquant":
        frame = frame.f_back
    names = {**frame.f_globals, **frame.f_locals}
    return next((name for name, one in names.items() if one is value and name[0] != "_"), "")


def _loaded(name: str, path: Any) -> str:
    """The code that makes a tensor of the file ``path``, whose variable is ``name``.

    >>> _loaded("path", "0.npy"), _loaded("path", "0.pt")
    ('torch.from_numpy(numpy.load(path))', 'torch.load(path)')
    """
    suffix = Path(os.fsdecode(path)).suffix.lower()
    if suffix in (".jpg", ".jpeg", ".png", ".webp"):
        return f"torchvision.io.decode_image({name})[None] / 255"
    return f"torch.from_numpy(numpy.load({name}))" if suffix == ".npy" else f"torch.load({name})"


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

    def __init__(self, model: nn.Module, argument: str, calibration: Any) -> None:
        self._signature = inspect.signature(model.forward)
        self._argument, self._was_said, self._given = argument, False, calibration

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
                each = "torch.from_numpy(batch)" if is_array else _loaded("batch", leaf)
                batches = name_in_call(self._given) or "batches"
                raise InputError(
                    f"a batch is a tensor, or holds some, and no {type(leaf).__name__}",
                    where=f"{self._argument}: {type(batch).__name__}",
                    fix=f"{self._argument}=[{each} for batch in {batches}]",
                )

    def __call__(self, batch: Any) -> Any:
        self.check(batch)
        if not self.has_labels(batch):
            self._say_taken(batch)
            return batch
        if not self._was_said:
            self._was_said = True
            _log.warning(
                "%s: the model gets the first of the %d values of each batch; labels are not used",
                *(self._argument, len(batch)),
            )
        return batch[0]

    def _say_taken(self, batch: Any) -> None:
        """Once, that an optional argument takes what may be the labels of a loader."""
        if self._was_said or type(batch) not in (tuple, list) or len(batch) < 2:
            return
        last = batch[-1]
        is_label = isinstance(last, torch.Tensor) and last.dim() < 2 and last.dtype == torch.int64
        if is_label and self._fits(batch) and self._fits(batch[:-1]):
            self._was_said = True
            bound = self._signature.bind(*batch).arguments
            _log.warning(
                "%s: the last value of each batch goes to the optional argument %r of the model; if these "
                "are labels, leave them out: [tuple(batch)[:-1] for batch in batches]",
                *(self._argument, next(reversed(bound))),
            )

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
    inputs = _Inputs(model, argument, calibration)
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


# Example inputs: given, or the first batch of the calibration set; run once to see that they fit.


_EXAMPLE = "the example inputs do"
_NO_BATCHES = (torch.Tensor, tuple, Mapping, str, bytes, os.PathLike)
DIVERGED = (
    "a checkpoint from before the training diverged; these are the tensors to look at:\n"
    "[name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]"
)
_BATCHES = (
    "one call's inputs: example_inputs=batches[0]; a list of batches is data: calibration=batches"
)


def called_on_example(
    model: nn.Module, example_inputs: Any, *, settles: bool = True
) -> ExampleCall:
    """What ``model``, which accepts ``example_inputs``, does with them.

    ``settles``: ``model`` is a copy that nobody else uses; where its first call changes parameters, it gets
    tensors of its own and is called once.

    Raises ``UsageError`` when there are none, ``InputError`` when the model does not accept them.

    >>> import torch
    >>> called_on_example(nn.ReLU(), torch.ones(1)).output
    tensor([1.])
    """
    if example_inputs is None:
        raise UsageError(
            "example inputs are needed",
            where="example_inputs=None",
            fix=named_inputs(model),
        )
    if isinstance(example_inputs, str):
        raise InputError(
            f"the example inputs are the text {example_inputs!r}",
            where=f"example_inputs={example_inputs!r}",
            fix=f"backend={example_inputs!r}, {named_inputs(model)}",
        )
    try:
        return _example_call(model, example_inputs, _EXAMPLE, settles)
    except WritesParameterError:
        raise
    except InputError as error:
        if isinstance(example_inputs, list | tuple) and _runs(model, example_inputs[:1]):
            raise InputError(error.what, where=error.where, fix=_BATCHES) from error.__cause__
        raise


def _runs(model: nn.Module, batches: Iterable[Any]) -> bool:
    try:
        for batch in batches:
            check_inputs(model, batch)
    except InputError:
        return False
    return bool(batches)


def call_that_runs(model: nn.Module, example_inputs: Any) -> tuple[ExampleCall | None, str]:
    """``called_on_example`` and no note; or ``None`` and a note when ``model`` does not accept the inputs.

    For the entry points of ``torch.ao.quantization``, which never run them. Raises ``UsageError`` when
    there are none, ``InputError`` when the call changes a parameter: what is prepared would, too.

    >>> import torch
    >>> call_that_runs(nn.Linear(3, 2), torch.zeros(1, 4))[1].partition(":")[0]
    'shapes are unknown'
    """
    try:
        return called_on_example(model, example_inputs, settles=False), ""
    except WritesParameterError:
        raise
    except InputError as error:
        return None, f"shapes are unknown: {error.what}   {error.where}"


def example_and_set(
    model: nn.Module, example_inputs: Any, calibration: Iterable[Any] | None
) -> tuple[Any, Iterable[Any] | None]:
    """Example inputs and calibration set; batches that were passed where example inputs stand are the set.

    >>> example_and_set(nn.ReLU(), iter([1, 2]), None)[0] is None
    True
    >>> example_and_set(nn.ReLU(), [1], None), example_and_set(nn.ReLU(), [1, 2], None)
    ((None, [1]), (None, [1, 2]))
    """
    if calibration is None and _are_batches(model, example_inputs):
        return None, example_inputs
    return example_inputs, calibration


def _are_batches(model: nn.Module, inputs: Any) -> bool:
    """Whether these are batches and no arguments: a loader, a data set, an iterator, what makes one; a list
    of one, or a list or another iterable that the model does not take."""
    if isinstance(inputs, Iterator | DataLoader | Dataset | FunctionType):
        return True
    if isinstance(inputs, list) and len(inputs) == 1:
        return True
    if not isinstance(inputs, Iterable) or isinstance(inputs, _NO_BATCHES):
        return False
    args, kwargs = as_arguments(inputs)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return True
    return not isinstance(inputs, list) and not _runs(model, [inputs])


def example_from(
    model: nn.Module, example_inputs: Any, calibration: Iterable[Any] | None
) -> tuple[ExampleCall, Iterable[Any] | None]:
    """A call on inputs that ``model`` accepts, and a calibration set that still holds every batch (or None).

    Raises ``UsageError`` when there are neither inputs nor a set, ``CalibrationError`` for a set that
    is none or is empty, ``InputError`` when the model does not accept the inputs.
    """
    if calibration is None:
        return called_on_example(model, example_inputs), None
    check_set(calibration)
    if example_inputs is not None:
        return called_on_example(model, example_inputs), calibration
    example, batches = first_batch(calibration)
    return _example_call(model, example, "the first batch of the calibration set does"), batches


def data_from(
    model: nn.Module, example: Any, calibration: Iterable[Any] | None
) -> tuple[Any, Iterable[Any] | None]:
    """A batch that is typical of the data, or the example without data; and ``calibration``, complete
    again.

    Raises as ``example_from``.
    """
    if calibration is None:
        return example, None
    data, batches = first_batch(calibration)
    if data is not example:
        _example_call(model, data, "the first batch of the calibration set does")
    return data, batches


def _refuse_lost(model: nn.Module, called: ExampleCall) -> ExampleCall:
    """``called``; raises ``UsageError`` where the model gave NaN, and a buffer has the reason. Minus infinity
    alone is a mask."""
    floats = [x for x in tensors_of(called.output) if x.is_floating_point()]
    if not any(bool(x.isnan().any()) for x in floats):
        return called
    buffers = [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]
    for name, buffer in buffers:
        lost = buffer.isnan() | buffer.isposinf()
        if lost.any():
            raise UsageError(
                f"the model gives NaN, and its buffer {name!r} holds {int(lost.sum())} values that are NaN "
                "or infinite",
                where=name,
                fix=DIVERGED,
            )
    return called


def _example_call(model: nn.Module, inputs: Any, subject: str, settles: bool = True) -> ExampleCall:
    try:
        try:
            called = ExampleCall.of(model, inputs)
        except WritesParameterError:
            if not settles:
                raise
            settle(model, *fresh(as_arguments(inputs)))
            called = ExampleCall.of(model, inputs)
        return _refuse_lost(model, called)
    except WritesParameterError:
        raise
    except InputError as error:
        what = error.what.replace(_EXAMPLE, subject, 1)
        call = re.sub(r"^example_inputs=(.*)   #", r"calibration=[\1, ...]   #", error.fix)
        fix = "\n".join(
            [*_advice(model, inputs, error), error.fix if subject == _EXAMPLE else call]
        )
        raise InputError(what, where=error.where, fix=fix) from error.__cause__


def _advice(model: nn.Module, inputs: Any, error: InputError) -> Iterator[str]:
    """The usual reasons: another device, labels beside the inputs, numpy arrays."""
    args, kwargs = as_arguments(inputs)
    values = (*args, *kwargs.values())
    elsewhere = other_devices(model, values)
    if elsewhere is not None:
        own, given = elsewhere
        if own.type == "meta":
            yield "model.load_state_dict(checkpoint, assign=True)   # weights on 'meta' have no values"
        elif given == "meta":
            yield f"tensors with values: torch.randn_like(x, device={str(own)!r})"
        else:
            yield f"tensors on {own}, where the model is, not on {given}: x.to({str(own)!r})"
    if len(args) > 1 and "positional argument" in error.what:
        yield "without labels, if the loader yields any: calibration=[inputs for inputs, _ in loader]"
    names = list(inspect.signature(model.forward).parameters)
    if "unexpected keyword argument" in error.what and set(names) <= kwargs.keys():
        yield f"calibration=[{{name: batch[name] for name in {names!r}}} for batch in batches]"
    path = next((value for value in values if isinstance(value, str | os.PathLike)), None)
    if path is not None:
        yield f"tensors, not names of files: calibration=[{_loaded('path', path)} for path in paths]"
    if any(type(value).__module__ == "numpy" for value in values):
        yield "tensors, not numpy arrays: torch.from_numpy(array)"
