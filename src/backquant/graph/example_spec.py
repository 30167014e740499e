"""Shapes and dtypes of example inputs, as data: enough to make inputs that a graph can be traced with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backquant.graph.example import as_arguments

__all__ = ["ExampleSpec"]

_TENSOR, _RANGE = "tensor", "range"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class ExampleSpec:
    """What a model was called with, without the values: JSON-able, and ``arguments()`` makes some.

    ``args`` and ``kwargs`` hold, for each tensor, ``{"tensor": [sizes…], "dtype": name}``, for integers
    and truth values also ``"range": [least, greatest]``; lists, tuples (as lists) and dicts of such; and
    numbers, strings and ``None`` as they are.

    >>> spec = ExampleSpec.of((torch.zeros(2, 3), True))
    >>> spec.args
    [{'tensor': [2, 3], 'dtype': 'float32'}, True]
    >>> [getattr(value, "shape", value) for value in spec.arguments()[0]]
    [torch.Size([2, 3]), True]
    """

    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> ExampleSpec | None:
        """The spec of a batch (tensor, tuple or dict); ``None`` where it holds other objects.

        >>> ExampleSpec.of(object()) is None
        True
        """
        args, kwargs = as_arguments(inputs)
        try:
            return cls(_described(list(args)), _described(kwargs))
        except TypeError:
            return None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, random with a fixed seed: floats, and integers of the range.

        Where the range is not known, integers are 0. So a mask of ones stays one, and tokens are some.
        """
        generator = torch.Generator().manual_seed(0)
        return tuple(_made(self.args, generator)), _made(self.kwargs, generator)

    def to_dict(self) -> dict[str, Any]:
        """``args`` and ``kwargs``; the inverse of ``ExampleSpec(**values)``."""
        return {"args": self.args, "kwargs": self.kwargs}


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        told = {_TENSOR: list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        return told | _range(value)
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _described(item) for key, item in value.items()}
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(type(value).__name__)


def _range(value: torch.Tensor) -> dict[str, list[int]]:
    if value.is_floating_point() or value.is_complex() or value.is_quantized or not value.numel():
        return {}
    return {_RANGE: [int(value.min()), int(value.max())]}


def _made(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, list):
        return [_made(item, generator) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR not in value:
        return {key: _made(item, generator) for key, item in value.items()}
    dtype = getattr(torch, value["dtype"])
    shape = tuple(value[_TENSOR])
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if _RANGE not in value:
        return torch.zeros(shape, dtype=dtype)
    least, greatest = value[_RANGE]
    return torch.randint(least, greatest + 1, shape, generator=generator).to(dtype)
