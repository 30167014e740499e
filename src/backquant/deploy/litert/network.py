"""Tensors and operators of a ``.tflite`` file before it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["DTYPES", "Network", "Operation", "Scales", "Tensor", "dtype_name"]

Array = NDArray[Any]
#: torch's dtypes by the name that the format has for them.
DTYPES = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.uint8: "UINT8",
    torch.bool: "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype.

    >>> dtype_name(torch.int8)
    'INT8'
    """
    return DTYPES[dtype]


@dataclass(frozen=True)
class Scales:
    """The qparams of a tensor: one scale, or one for each slice along ``axis``."""

    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    axis: int = 0

    @classmethod
    def one(cls, scale: float, zero_point: int) -> Scales:
        """One scale for the tensor; float32, as the format stores it.

        >>> Scales.one(0.5, 3)
        Scales(scale=(0.5,), zero_point=(3,), axis=0)
        """
        return cls((float(np.float32(scale)),), (int(zero_point),))


@dataclass(eq=False)
class Tensor:
    """One tensor. ``shape``: for the example inputs; ``signature``: the same with -1 where a size is free."""

    name: str
    shape: tuple[int, ...]
    signature: tuple[int, ...]
    dtype: str
    scales: Scales | None = None
    data: Array | None = None

    @property
    def is_integer(self) -> bool:
        """Whether it holds quantized values."""
        return self.scales is not None and self.dtype in ("INT8", "INT16", "INT4")


@dataclass(eq=False)
class Operation:
    """One operator; ``node``: the node of the reference graph that it computes."""

    code: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)
    node: str = ""


@dataclass(eq=False)
class Network:
    """Operators in order of execution; ``input_names`` and ``output_names`` are those of the signature."""

    operations: list[Operation] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    output_names: list[str] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """Every tensor once, inputs first."""
        found: dict[int, Tensor] = {}
        for tensor in self.inputs:
            found[id(tensor)] = tensor
        for operation in self.operations:
            for each in (*operation.inputs, *operation.outputs):
                if each is not None:
                    found[id(each)] = each
        for tensor in self.outputs:
            found[id(tensor)] = tensor
        return list(found.values())

    def name_tensors(self) -> None:
        """Give each tensor a name of its own."""
        tensors = self.tensors()
        for tensor, name in zip(tensors, _unique([each.name for each in tensors]), strict=True):
            tensor.name = name

    def drop_unread(self) -> None:
        """Leave out operators whose results nobody reads."""
        read = {id(tensor) for tensor in self.outputs}
        kept = []
        for operation in reversed(self.operations):
            if read.intersection(map(id, operation.outputs)):
                kept.append(operation)
                read.update(id(each) for each in operation.inputs if each is not None)
        self.operations = kept[::-1]

    def transposes_inside(self) -> list[Operation]:
        """Operators that move values to another layout, but for those of inputs and of outputs, where
        these are only converted in between."""
        first = {id(tensor) for tensor in self.inputs}
        for operation in self.operations:
            if operation.code in _CONVERSIONS and id(operation.inputs[0]) in first:
                first.update(map(id, operation.outputs))
        last = {id(tensor) for tensor in self.outputs}
        for operation in reversed(self.operations):
            if operation.code in _CONVERSIONS and id(operation.outputs[0]) in last:
                last.add(id(operation.inputs[0]))
        return [
            each
            for each in self.operations
            if each.code == "TRANSPOSE"
            and id(each.inputs[0]) not in first
            and id(each.outputs[0]) not in last
        ]


_CONVERSIONS = ("DEQUANTIZE", "QUANTIZE")


def _unique(names: Sequence[str]) -> list[str]:
    """``names``, with a number after those that are there already.

    >>> _unique(["a", "b", "a"])
    ['a', 'b', 'a_1']
    """
    made: list[str] = []
    taken: set[str] = set(names)
    seen: set[str] = set()
    counts: dict[str, int] = {}
    for name in names:
        one = name
        while one in seen or (one != name and one in taken):
            counts[name] = counts.get(name, 0) + 1
            one = f"{name}_{counts[name]}"
        seen.add(one)
        made.append(one)
    return made
