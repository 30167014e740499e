"""A model some parts of which are quantized."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from backquant.graph import get_module, shallow_copy
from backquant.graph.edit import set_module
from backquant.report.words import percent
from backquant.runtime import QuantizedModel

_SHOWN = 12  # reasons


@dataclass(frozen=True)
class PartlyQuantized:
    """A model of the class that it had, with quantized models in place of parts of it; print it to see which.

    ``model``: is called, and has the methods and attributes, as the original. ``parts``: the quantized models
    by their paths in it, each with its own ``report``. ``multiply_adds``: those of each part for the first
    batch; ``total``: of all of the model; ``uncounted``: the operators of which they are not known, which no
    share counts. ``in_float``: why other parts stay float, by path.
    """

    model: nn.Module
    parts: Mapping[str, QuantizedModel]
    multiply_adds: Mapping[str, int]
    total: int
    in_float: Mapping[str, str]
    uncounted: tuple[str, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, without gradients."""
        with torch.no_grad():
            return self.model(*args, **kwargs)

    @property
    def coverage(self) -> float:
        """The share of the model's multiply-adds that are quantized, 0 to 1; NaN where it has none, or where
        that of a part is not known."""
        shares = {path: part.report.coverage for path, part in self.parts.items()}
        done = sum(self.multiply_adds[path] * share for path, share in shares.items())
        return float(done / self.total) if self.total else math.nan

    def compile(self) -> PartlyQuantized:
        """The same with compiled parts. Raises as ``QuantizedModel.compile``."""
        made = {path: part.compile() for path, part in self.parts.items()}
        return replace(self, model=with_parts(self.model, made), parts=made)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the reports of the parts by path, and what stays float."""
        parts = {
            path: {"multiply_adds": self.multiply_adds[path], "report": part.report.to_dict()}
            for path, part in self.parts.items()
        }
        coverage = None if math.isnan(self.coverage) else self.coverage
        return {
            "coverage": coverage,
            "multiply_adds": self.total,
            "parts": parts,
            "in_float": dict(self.in_float),
            "uncounted": list(self.uncounted),
        }

    def __str__(self) -> str:
        lines = [
            f"{type(self.model).__name__}: {percent(self.coverage)} of the multiply-adds quantized"
        ]
        for path, part in self.parts.items():
            share = self._share(self.multiply_adds[path])
            lines.append(
                f"  {path}: {share} of the model, {percent(part.report.coverage)} of it quantized"
            )
        outside = self.total - sum(self.multiply_adds.values())
        lines.append(f"  outside of these parts: {self._share(outside)}")
        lines += [f"    {path}: {why}" for path, why in list(self.in_float.items())[:_SHOWN]]
        if len(self.in_float) > _SHOWN:
            lines.append(f"    and {len(self.in_float) - _SHOWN} more: .in_float")
        if self.uncounted:
            lines.append(f"  not counted: {', '.join(self.uncounted)}")
        return "\n".join(lines)

    def _share(self, multiply_adds: int) -> str:
        return percent(multiply_adds / self.total if self.total else math.nan)


def with_parts(model: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of ``model``, which shares its tensors, with ``parts`` at their paths, and wherever else the
    modules stand that are there now.

    >>> relu = nn.ReLU()
    >>> with_parts(nn.Sequential(relu, relu), {"0": nn.Tanh()})
    Sequential(
      (0): Tanh()
      (1): Tanh()
    )
    """
    copied = shallow_copy(model)
    places: dict[int, list[str]] = {}
    for path, module in copied.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(path)
    standing = {path: places[id(get_module(copied, path))] for path in parts}
    for path, made in parts.items():
        for place in standing[path]:
            if not lies_within(place, parts):
                set_module(copied, place, made)
    return copied


def lies_within(path: str, others: Container[str]) -> bool:
    """Whether a module stands inside of one of ``others``.

    >>> lies_within("a.b.c", {"a.b"}), lies_within("a.bc", {"a.b"}), lies_within("a.b", {"a.b"})
    (True, False, False)
    """
    names = path.split(".")
    return any(".".join(names[:end]) in others for end in range(1, len(names)))
