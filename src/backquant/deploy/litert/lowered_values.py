"""What the nodes of a program stand for while it is lowered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from backquant.deploy.litert.layouts import Layout, logical
from backquant.deploy.litert.network import Array, Scales, Tensor
from backquant.errors import ExportError

__all__ = [
    "Constant",
    "Dequantized",
    "UnsupportedError",
    "Value",
    "hints",
    "signature_of",
    "sizes_of",
]


class UnsupportedError(Exception):
    """An operator that the format cannot express; the words say what of it."""


@dataclass(eq=False)
class Value:
    """A tensor of the file. ``layout``: see ``layouts``. ``columns``: of a value that only linear layers
    read, where each value of its last axis comes from."""

    tensor: Tensor
    layout: Layout
    columns: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in PyTorch's order."""
        return logical(self.tensor.shape, self.layout)

    @property
    def signature(self) -> tuple[int, ...]:
        """The same with -1 for free sizes."""
        return logical(self.tensor.signature, self.layout)

    @property
    def scales(self) -> Scales | None:
        """The qparams of the tensor."""
        return self.tensor.scales


@dataclass(eq=False)
class Dequantized:
    """A dequantize node that no operator has needed in float yet."""

    integers: Value
    floats: Value | None = None


@dataclass(eq=False)
class Constant:
    """What depends on no input: its value and, of a dequantized one, the integers and their qparams."""

    name: str
    value: torch.Tensor
    integers: torch.Tensor | None = None
    scales: Scales | None = None

    def tensor(self) -> Tensor:
        """Its value in the file, in PyTorch's order."""
        return constant_tensor(self.name, as_array(self.value))

    def integer_tensor(self, dtype: str = "") -> Tensor:
        """Its integers in the file."""
        assert self.integers is not None
        made = constant_tensor(self.name, as_array(self.integers))
        made.scales = self.scales
        made.dtype = dtype or made.dtype
        return made


def as_array(value: torch.Tensor) -> Array:
    """A tensor as the array that a file holds: numbers of 64 bits in 32."""
    value = value.detach().cpu()
    if value.dtype in (torch.float64, torch.bfloat16):
        value = value.float()
    if value.is_complex():
        raise UnsupportedError("complex numbers")
    return np.asarray(value.contiguous().numpy())


_NAMES = {"float32": "FLOAT32", "float16": "FLOAT16", "bool": "BOOL"}


def constant_tensor(name: str, data: Array) -> Tensor:
    """A constant of the file.

    >>> constant_tensor("a", np.zeros((2, 3), np.int32)).dtype
    'INT32'
    """
    dtype = _NAMES.get(data.dtype.name, data.dtype.name.upper())
    return Tensor(name, data.shape, data.shape, dtype, data=data)


def hints(value: Any) -> Any:
    """Sizes as numbers: a free one has that of the example inputs."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val", value)
    if isinstance(value, torch.SymInt):
        return int(value.node.hint)
    if isinstance(value, torch.SymFloat):
        return float(value.node.hint)
    if isinstance(value, (list, tuple)):
        return type(value)(map(hints, value))
    return value


def sizes_of(node: fx.Node) -> tuple[int, ...]:
    """The sizes of a node's tensor for the example inputs."""
    return tuple(hints(size) for size in _tensor(node).shape)


def signature_of(node: fx.Node) -> tuple[int, ...]:
    """The same with -1 where a size is free."""
    return tuple(
        size if isinstance(size, int) else -1 if _is_symbolic(size) else int(size)
        for size in _tensor(node).shape
    )


def _is_symbolic(size: Any) -> bool:
    return not size.node.expr.is_number


def _tensor(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise ExportError(f"{node.name} is no tensor", where="export")
    return value
