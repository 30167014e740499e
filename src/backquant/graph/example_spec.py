"""Example inputs as data: enough to make inputs that a graph can be traced with.

1. Integers, truth values and floats that are whole or infinite (masks, one-hot rows) are kept as they are, up
   to 16384 of a tensor: indices, offsets and lengths belong together, and others would not run. Above that,
   integers are drawn within their range.
2. Of objects (caches of keys and values) the parts that hold tensors are kept; they come back as namespaces,
   of which a graph reads the same parts. Named tuples come back as such, of a class of their own.
3. Of other floats (images, sounds, features) only shape, mean, deviation and range are kept: they may be
   large, or nobody else's business, and any of their kind runs.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from backquant.graph.example import as_arguments
from backquant.graph.objects import Shell, object_classes

_TENSOR, _RANGE, _VALUES, _SPREAD = "tensor", "range", "values", "spread"
_OBJECT, _NAMED = "object", "named"
_KEPT = 16384  # elements up to which the values of an integer tensor are kept
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class ExampleSpec:
    """What a model was called with: JSON-able, and ``arguments()`` makes inputs of it.

    ``args`` and ``kwargs`` hold, for each tensor, ``{"tensor": [sizes…], "dtype": name}`` with either
    ``"values"`` (row by row, infinities as text), or ``"range": [least, greatest]`` and for floats
    ``"spread": [mean, deviation]``; lists, tuples (as lists) and dicts of such; ``{"object": {name: …}}``,
    ``{"named": {field: …}}``; and numbers, strings and ``None`` as they are.

    >>> spec = ExampleSpec.of((torch.tensor([0, 3, 5]), torch.rand(2, 3), True))
    >>> spec.args[0]
    {'tensor': [3], 'dtype': 'int64', 'values': [0, 3, 5]}
    >>> sorted(spec.args[1])
    ['dtype', 'range', 'spread', 'tensor']
    >>> [getattr(value, "shape", value) for value in spec.arguments()[0]]
    [torch.Size([3]), torch.Size([2, 3]), True]
    >>> pair = namedtuple("Pair", ["first", "second"])(torch.ones(1), 2)
    >>> ExampleSpec.of((pair,)).arguments()[0][0].first
    tensor([1.])
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
        """Positional and keyword arguments: the values that were kept, and others drawn with a fixed seed.

        Integers of which only the range is known are drawn from it, floats from the normal distribution
        of their mean and deviation, cut off at their range.
        """
        generator = torch.Generator().manual_seed(0)
        return tuple(_made(self.args, generator)), _made(self.kwargs, generator)

    def to_dict(self) -> dict[str, Any]:
        """``args`` and ``kwargs``; the inverse of ``ExampleSpec(**values)``."""
        return {"args": self.args, "kwargs": self.kwargs}


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:  # no sparse one
        told = {_TENSOR: list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        return told | _range(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {_NAMED: dict(zip(value._fields, map(_described, value), strict=True))}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _described(item) for key, item in value.items()}
    if isinstance(value, _PLAIN):
        return value
    if object_classes(value) and (held := Shell.of(value))[0]:
        return {_OBJECT: dict(zip(held[1].names, map(_described, held[0]), strict=True))}
    raise TypeError(type(value).__name__)


def _range(value: torch.Tensor) -> dict[str, Any]:
    if value.is_complex() or value.is_quantized or not value.numel():
        return {}
    values = value.detach()
    if values.is_floating_point():
        values = values.double()
        if not _is_whole(values):
            return _spread(values)
    if values.numel() <= _KEPT:
        return {_VALUES: [_plain(number) for number in values.flatten().tolist()]}
    finite = values[values.isfinite()]
    if not finite.numel():
        return {}
    return {_RANGE: [int(finite.min()), int(finite.max())]}


def _is_whole(values: torch.Tensor) -> bool:
    return not bool(values.isnan().any()) and torch.equal(values, values.trunc())


def _plain(number: float) -> Any:
    return str(number) if isinstance(number, float) and math.isinf(number) else number


def _spread(values: torch.Tensor) -> dict[str, Any]:
    finite = values[values.isfinite()]
    if not finite.numel():
        return {}
    spread = [float(finite.mean()), float(finite.std(correction=0))]
    return {_RANGE: [float(finite.min()), float(finite.max())], _SPREAD: spread}


def _made(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, list):
        return [_made(item, generator) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_OBJECT}:
        return SimpleNamespace(**_made(value[_OBJECT], generator))
    if value.keys() == {_NAMED}:
        fields = _made(value[_NAMED], generator)
        return namedtuple("Arguments", fields, rename=True)(*fields.values())
    if _TENSOR not in value:
        return {key: _made(item, generator) for key, item in value.items()}
    dtype, shape = getattr(torch, value["dtype"]), tuple(value[_TENSOR])
    if _VALUES in value:
        numbers = [float(item) if isinstance(item, str) else item for item in value[_VALUES]]
        return torch.tensor(numbers, dtype=dtype).reshape(shape)
    if dtype.is_floating_point:
        return _floats(value, shape, generator).to(dtype)
    if _RANGE not in value:
        return torch.zeros(shape, dtype=dtype)
    least, greatest = value[_RANGE]
    return torch.randint(least, greatest + 1, shape, generator=generator).to(dtype)


def _floats(
    told: Mapping[str, Any], shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    made = torch.randn(shape, generator=generator)
    if _SPREAD in told:
        mean, deviation = told[_SPREAD]
        made = made * deviation + mean
    return made.clamp(*told[_RANGE]) if _RANGE in told else made
