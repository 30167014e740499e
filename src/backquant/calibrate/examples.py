"""Example inputs: given, or the first batch of the calibration set; run once to see that they fit."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from backquant.calibrate.batches import check_set, first_batch
from backquant.errors import InputError, UsageError
from backquant.graph import as_arguments, check_inputs
from backquant.graph.devices import other_devices
from backquant.graph.example import inputs_of
from backquant.graph.example_call import ExampleCall
from backquant.graph.objects import fresh
from backquant.graph.settle import WritesParameterError, settle

_NO_BATCHES = (torch.Tensor, tuple, Mapping, str, bytes, os.PathLike)
_EXAMPLE = "the example inputs do"
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
            fix=inputs_of(model),
        )
    if isinstance(example_inputs, str):
        raise InputError(
            f"the example inputs are the text {example_inputs!r}",
            where=f"example_inputs={example_inputs!r}",
            fix=f"backend={example_inputs!r}, {inputs_of(model)}",
        )
    try:
        return _called(model, example_inputs, _EXAMPLE, settles)
    except WritesParameterError:
        raise
    except InputError as error:
        if isinstance(example_inputs, list | tuple) and _runs(model, example_inputs[:1]):
            raise InputError(error.what, where=error.where, fix=_BATCHES) from error
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
    return _called(model, example, "the first batch of the calibration set does"), batches


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
        _called(model, data, "the first batch of the calibration set does")
    return data, batches


def _called(model: nn.Module, inputs: Any, subject: str, settles: bool = True) -> ExampleCall:
    try:
        try:
            return ExampleCall.of(model, inputs)
        except WritesParameterError:
            if not settles:
                raise
            settle(model, *fresh(as_arguments(inputs)))
            return ExampleCall.of(model, inputs)
    except WritesParameterError:
        raise
    except InputError as error:
        what = error.what.replace(_EXAMPLE, subject, 1)
        call = re.sub(r"^example_inputs=(.*)   #", r"calibration=[\1, ...]   #", error.fix)
        fix = "\n".join(
            [*_advice(model, inputs, error), error.fix if subject == _EXAMPLE else call]
        )
        raise InputError(what, where=error.where, fix=fix) from error


def _advice(model: nn.Module, inputs: Any, error: InputError) -> Iterator[str]:
    """The usual reasons: another device, labels beside the inputs, numpy arrays, float64."""
    args, kwargs = as_arguments(inputs)
    values = (*args, *kwargs.values())
    elsewhere = other_devices(model, values)
    if elsewhere is not None:
        own, given = elsewhere
        yield f"tensors on {own}, where the model is, not on {given}: x.to({str(own)!r})"
    if len(args) > 1 and "positional argument" in error.what:
        yield "without labels, if the loader yields any: calibration=[inputs for inputs, _ in loader]"
    names = list(inspect.signature(model.forward).parameters)
    if "unexpected keyword argument" in error.what and set(names) <= kwargs.keys():
        yield f"calibration=[{{name: batch[name] for name in {names!r}}} for batch in batches]"
    if any(isinstance(value, str | os.PathLike) for value in values):
        yield "tensors, not names of files: calibration=[load(path) for path in paths]"
    if any(type(value).__module__ == "numpy" for value in values):
        yield "tensors, not numpy arrays: torch.from_numpy(array)"
    wide = any(isinstance(v, torch.Tensor) and v.dtype == torch.float64 for v in values)
    if wide and not any(p.dtype == torch.float64 for p in model.parameters()):
        yield "float32 like the model, not float64: x.float()"
