"""Sample calls of operators as data, and the small modules that make them.

A ``Sample`` says which inputs an operator takes and how each of its spellings is called; the
builders turn it into ``(module, inputs)`` that runs, and that a symbolic trace captures as one
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SEED = 7


class Example(NamedTuple):
    """A module that runs one operator, and positional inputs for it."""

    module: nn.Module
    inputs: tuple[Tensor, ...]


class _Input:
    """Marks the place of the next input in a call."""

    def __repr__(self) -> str:
        return "INPUT"


INPUT = _Input()


@dataclass(frozen=True)
class Weight:
    """Marks the place of a tensor of this shape that belongs to the module, not to its inputs.

    A buffer (running statistics) is not trained and must not be negative.
    """

    shape: tuple[int, ...]
    is_buffer: bool = False


@dataclass(frozen=True)
class Sample:
    """How to build and call an operator.

    1. ``shapes`` are the inputs: float32 in ``[-3, 3]``, or integers below ``integers`` if set.
    2. ``module_args`` construct the module spelling.
    3. ``call`` holds the positional arguments of the function and method spellings, ``INPUT`` and
       ``Weight`` marking tensors; ``aten`` those of the aten overloads where they differ.
    """

    shapes: tuple[tuple[int, ...], ...] = ((2, 4, 8, 8),)
    module_args: tuple[Any, ...] = ()
    module_kwargs: dict[str, Any] = field(default_factory=dict)
    call: tuple[Any, ...] = (INPUT,)
    aten: tuple[Any, ...] | None = None
    integers: int | None = None

    @property
    def aten_call(self) -> tuple[Any, ...]:
        return self.call if self.aten is None else self.aten

    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors of ``shapes``, the same at every call."""
        generator = torch.Generator().manual_seed(SEED)
        if self.integers is not None:
            return tuple(torch.randint(self.integers, s, generator=generator) for s in self.shapes)
        return tuple(torch.rand(s, generator=generator) * 6 - 3 for s in self.shapes)


class _Call(nn.Module):
    """Calls one function, aten overload or method, with inputs and weights in their places."""

    def __init__(self, target: Callable[..., Any] | str, template: Sequence[Any]) -> None:
        super().__init__()
        self.target = target
        self.template = tuple(template)
        generator = torch.Generator().manual_seed(SEED)
        weights = [item for item in template if isinstance(item, Weight)]
        for index, weight in enumerate(weights):
            value = torch.rand(weight.shape, generator=generator)
            if weight.is_buffer:
                self.register_buffer(f"tensor{index}", value)
            else:
                setattr(self, f"tensor{index}", nn.Parameter(value - 0.5))

    def call(self, *inputs: Any) -> Any:
        rest = iter(inputs)
        weights = iter(range(len(self.template)))
        args: list[Any] = []
        for item in self.template:
            if item is INPUT:
                args.append(next(rest))
            elif isinstance(item, list):
                args.append([next(rest) for _ in item])
            elif isinstance(item, Weight):
                args.append(getattr(self, f"tensor{next(weights)}"))
            else:
                args.append(item)
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:])
        return self.target(*args)


class _UnaryCall(_Call):
    def forward(self, x: Tensor) -> Any:
        return self.call(x)


class _BinaryCall(_Call):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.call(x, y)


class _TernaryCall(_Call):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:
        return self.call(x, y, z)


_WRAPPERS = (_UnaryCall, _BinaryCall, _TernaryCall)


def build_module(cls: type[nn.Module], sample: Sample) -> Example:
    """An instance of ``cls`` in evaluation mode with reproducible weights, and its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = cls(*sample.module_args, **sample.module_kwargs)
    return Example(module.eval(), sample.inputs())


def build_call(
    target: Callable[..., Any] | str, sample: Sample, template: Sequence[Any]
) -> Example:
    """A module in evaluation mode that calls ``target`` once, and its inputs."""
    wrapper = _WRAPPERS[len(sample.shapes) - 1]
    return Example(wrapper(target, template).eval(), sample.inputs())
