"""Random models: a graph of operations over tensors, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from against_torch.operations import OPERATIONS, Operation

__all__ = ["RandomModel", "Step", "batches"]

_INPUTS: tuple[tuple[int, ...], ...] = ((2, 4, 6, 6), (2, 4, 6, 6), (2, 4, 8), (2, 8))
_LARGEST = 2048  # elements of a value
_FAR = 100.0  # largest magnitude of a value on the first batch


@dataclass(frozen=True)
class Step:
    """One operation on earlier values; ``modules`` are positions in ``RandomModel.parts``."""

    operation: Operation
    first: int
    second: int
    modules: tuple[int, ...]


class RandomModel(nn.Module):
    """A graph drawn from ``seed``, in evaluation mode, with batch norms that do something.

    ``keywords`` spells the calls that have such a form with named arguments; the graph is the same.
    The modules and every value's shape are found by running the graph while it is built.
    """

    def __init__(self, seed: int, *, keywords: bool = False) -> None:
        super().__init__()
        self.keywords = keywords
        self.parts = nn.ModuleList()
        self.steps: list[Step] = []
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            _Builder(self, random.Random(seed)).build()
        self.eval()

    def forward(self, x: Any) -> Any:
        values = [x]
        for step in self.steps:
            values.append(self.apply_step(step, values))
        return self.form(values)

    def form(self, values: list[Any]) -> Any:
        chosen = [values[index] for index in self.outputs]
        if self.container == "dict":
            return {f"output{i}": value for i, value in enumerate(chosen)}
        return chosen[0] if len(chosen) == 1 else tuple(chosen)

    def apply_step(self, step: Step, values: list[Any]) -> Any:
        modules = tuple(self.parts[index] for index in step.modules)
        module = modules[0] if len(modules) == 1 else modules
        spelled = step.operation.keyword if self.keywords else None
        call = step.operation.call if spelled is None else spelled
        return call(module, values[step.first], values[step.second])

    outputs: tuple[int, ...] = ()
    container: str = ""


def batches(model: RandomModel, seed: int, count: int = 3) -> list[torch.Tensor]:
    """Inputs for a model, drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = model.input_shape
    return [torch.randn(shape, generator=generator) for _ in range(count)]


class _Builder:
    def __init__(self, model: RandomModel, choose: random.Random) -> None:
        self.model = model
        self.choose = choose
        self.made: dict[tuple[Any, ...], tuple[int, ...]] = {}
        model.input_shape = choose.choice(_INPUTS)
        self.values = [torch.randn(model.input_shape)]

    def build(self) -> None:
        wanted = self.choose.randrange(4, 18)
        for _ in range(6 * wanted):
            if len(self.model.steps) == wanted:
                break
            self._try_step()
        last = len(self.values) - 1
        others = self.choose.sample(range(1, last), min(last - 1, self.choose.choice([0, 0, 1, 2])))
        self.model.outputs = (last, *others)
        if self.choose.random() < 0.1:
            self.model.container = "dict"

    def _try_step(self) -> None:
        last = len(self.values) - 1
        first = last if self.choose.random() < 0.65 else self.choose.randrange(last + 1)
        rank = self.values[first].dim()
        fitting = [op for op in OPERATIONS if rank in op.ranks]
        operation = self.choose.choices(fitting, [op.weight for op in fitting])[0]
        second = self._second(operation, first)
        if second is None:
            return
        count = len(self.model.parts)
        step = Step(operation, first, second, self._modules(operation, first, second))
        values = [value.clone() for value in self.values]
        try:
            result = self.model.apply_step(step, values)
        except ValueError:  # two halves of one channel
            result = torch.empty(0)
        if not self._usable(result):
            del self.model.parts[count:]
            self.made = {k: m for k, m in self.made.items() if all(i < count for i in m)}
            return
        for index in step.modules:
            if index >= count:
                self._settle(self.model.parts[index], count)
        # Operations in place change what later steps read: keep what they leave behind.
        self.values = [*values, self.model.apply_step(step, values)]
        self.model.steps.append(step)

    def _second(self, operation: Operation, first: int) -> int | None:
        if not operation.second:
            return first
        shape = self.values[first].shape
        joins = operation.second == "joinable"
        fitting = [
            index
            for index, value in enumerate(self.values)
            if value.shape == shape
            or (joins and value.dim() == len(shape) and value.shape[2:] == shape[2:])
        ]
        return self.choose.choice(fitting)

    def _modules(self, operation: Operation, first: int, second: int) -> tuple[int, ...]:
        if operation.make is None:
            return ()
        shapes = tuple(self.values[first].shape), tuple(self.values[second].shape)
        key = (operation.make, shapes)
        if key in self.made and self.choose.random() < 0.4:
            return self.made[key]
        made = operation.make(self.choose, *shapes)
        parts = made if isinstance(made, tuple) else (made,)
        places = tuple(range(len(self.model.parts), len(self.model.parts) + len(parts)))
        self.model.parts.extend(parts)
        self.made[key] = places
        return places

    def _settle(self, module: nn.Module, before: int) -> None:
        module.eval()
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and self.choose.random() < 0.15:
            for other in list(self.model.parts)[:before]:
                if type(other) is type(module) and other.weight.shape == module.weight.shape:
                    module.weight = other.weight
                    return

    def _usable(self, result: Any) -> bool:
        if result.numel() == 0 or result.numel() > _LARGEST or result.dim() not in (2, 3, 4):
            return False
        return bool(result.isfinite().all()) and float(result.abs().max()) < _FAR
