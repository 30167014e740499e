"""One batch as a call of the model: argument names, and the checks before it is run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from backquant.errors import CalibrationError, InputError
from backquant.graph import as_arguments, get_module
from backquant.graph.example import describe_value, inputs_of
from backquant.graph.inputs_behind import inputs_behind
from backquant.observe import is_observer_or_fake_quantize
from backquant.operators import moves_values


def bound_arguments(model: fx.GraphModule, batch: Any, index: int) -> inspect.BoundArguments:
    """The arguments of ``model.forward`` that a batch gives: a tensor is the first, a tuple (or list)
    holds positional arguments, a dict keyword arguments.

    Raises InputError, naming the batch, when they do not match the parameters.

    >>> model = fx.symbolic_trace(lambda x, y: x + y)
    >>> list(bound_arguments(model, {"x": 1, "y": 2}, 0).arguments)
    ['x', 'y']
    """
    args, kwargs = as_arguments(batch)
    signature = inspect.signature(model.forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"batch {index} does not fit the model: {error}",
            where=f"batch {index}: {_spelled(args, kwargs)}",
            fix=inputs_of(model).replace("example_inputs=", "batch = ", 1)
            + "\nfor instance calibration=[(x,) for x, label in loader]",
        ) from error


def check_values(
    bound: inspect.BoundArguments, index: int, measured: Collection[str] | None = None
) -> None:
    """Refuse NaN, infinite values and empty tensors in the inputs of one batch.

    ``measured``: the arguments in which infinite values are refused; ``None``: all. In a mask that is added
    in float they mean something.

    Raises CalibrationError that names the batch and the input.

    >>> bound = bound_arguments(fx.symbolic_trace(lambda x: x), torch.tensor([1.0, float("nan")]), 3)
    >>> check_values(bound, 3)
    Traceback (most recent call last):
    ...
    backquant.errors.CalibrationError: input 'x' of batch 3 holds 1 NaN and 0 infinite values
      where  batch 3, input 'x': float32[2]
      fix    leave this batch out, or clean it: torch.nan_to_num(x)
    """
    for name, tensor in _named_tensors(bound.arguments):
        argument = name.partition(".")[0].partition("[")[0]
        where = f"batch {index}, input {name!r}: {describe_value(tensor)}"
        if tensor.numel() == 0:
            raise CalibrationError(
                f"input {name!r} of batch {index} holds no values",
                where=where,
                fix="leave empty batches out of the calibration set",
            )
        is_dense = tensor.layout is torch.strided
        if not is_dense or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if not _all_finite(tensor):
            missing = int(torch.isnan(tensor).sum())
            endless = int(torch.isinf(tensor).sum())
            if not missing and measured is not None and argument not in measured:
                continue
            raise CalibrationError(
                f"input {name!r} of batch {index} holds {missing} NaN and {endless} infinite values",
                where=where,
                fix="leave this batch out, or clean it: torch.nan_to_num(x)",
            )


def measured_inputs(model: fx.GraphModule) -> frozenset[str]:
    """The arguments of ``model`` whose infinities reach an observer, or a quantization.

    >>> measured_inputs(fx.symbolic_trace(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)))
    frozenset({'x'})
    """
    values = [
        source
        for node in model.graph.nodes
        if _measures(model, node)
        for source in node.all_input_nodes[:1]
    ]
    found = inputs_behind(model, values, moves_values)
    return frozenset(str(node.target).lstrip("*") for node, _ in found)


def _measures(model: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module":
        return "quantize_per_" in str(node.target) and "dequantize" not in str(node.target)
    called = get_module(model, str(node.target))
    return isinstance(called, fx.GraphModule) or is_observer_or_fake_quantize(called)


def described(bound: inspect.BoundArguments) -> str:
    """Names, dtypes and shapes of the tensors of one call.

    >>> described(bound_arguments(fx.symbolic_trace(lambda x: x), torch.zeros(2, 3), 0))
    'x: float32[2, 3]'
    """
    parts = [f"{name}: {describe_value(t)}" for name, t in _named_tensors(bound.arguments)]
    return ", ".join(parts) or "no tensors"


def _all_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite, by the extremes, which show NaN as well; much cheaper than a mask."""
    if tensor.is_complex():
        return bool(torch.isfinite(tensor).all())
    return math.isfinite(tensor.amin().item()) and math.isfinite(tensor.amax().item())


def _named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named_tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for position, inner in enumerate(value):
            yield from _named_tensors(inner, f"{name}[{position}]")


def _spelled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    parts = [describe_value(value) for value in args]
    parts += [f"{name}={describe_value(value)}" for name, value in kwargs.items()]
    return "(" + ", ".join(parts) + ")"
