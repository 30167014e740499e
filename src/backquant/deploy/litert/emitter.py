"""Writes operators into a network: layouts, conversions between dtypes, and constants, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from backquant.deploy.litert.layouts import Layout, is_free, plain, stored
from backquant.deploy.litert.lowered_values import Constant, Value, constant_tensor
from backquant.deploy.litert.network import Network, Operation, Scales, Tensor

__all__ = ["Emitter"]

_LIMITS = {"INT8": (-128, 127), "INT16": (-32768, 32767)}


class Emitter:
    """``node``: the node of the reference graph that operators are written for at the moment."""

    def __init__(self) -> None:
        self.network = Network()
        self.node = ""
        self._laid: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._converted: dict[tuple[int, Any], Tensor] = {}
        self._constants: dict[Any, Tensor] = {}
        self._keyed: list[Any] = []  # by identity: they live as long as this does

    def emit(
        self, code: str, inputs: Sequence[Tensor | None], output: Tensor, **options: Any
    ) -> Tensor:
        """Append one operator; its output."""
        self.network.operations.append(
            Operation(code, tuple(inputs), (output,), options, self.node)
        )
        return output

    def like(self, source: Tensor, shape: Sequence[int], **changes: Any) -> Tensor:
        """A new tensor of ``shape`` with the dtype and qparams of ``source``; free sizes stay free where
        they are on the same axis."""
        shape = tuple(shape)
        signature = changes.pop("signature", None) or tuple(
            -1 if i < len(source.signature) and source.signature[i] == -1 else size
            for i, size in enumerate(shape)
        )
        made = Tensor(source.name, shape, signature, source.dtype, source.scales)
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    def integers(self, values: Sequence[int], name: str = "sizes") -> Tensor:
        """A constant list of int32: axes, sizes, paddings."""
        key = ("integers", tuple(values))
        if key not in self._constants:
            self._constants[key] = constant_tensor(name, np.array(values, np.int32))
        return self._constants[key]

    def pairs(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """A constant table of int32."""
        key = ("pairs", tuple(map(tuple, rows)))
        if key not in self._constants:
            self._constants[key] = constant_tensor("paddings", np.array(rows, np.int32))
        return self._constants[key]

    def laid(self, value: Value, layout: Layout) -> Tensor:
        """The tensor of ``value`` in ``layout``: itself, a constant stored so, a reshape of sizes of 1, or a
        transpose. Values that permutations made of one tensor have other layouts: what counts is the order of
        the stored axes."""
        if value.layout == layout:
            return value.tensor
        order = tuple(value.layout.index(axis) for axis in layout)
        key = (id(value.tensor), order)
        if key not in self._laid:
            self._keyed.append(value.tensor)
            self._laid[key] = self._moved(value, layout, order)
        return self._laid[key]

    def _moved(self, value: Value, layout: Layout, order: tuple[int, ...]) -> Tensor:
        tensor = value.tensor
        made = self.like(
            tensor,
            stored(value.shape, layout),
            signature=stored(value.signature, layout),
        )
        if tensor.data is not None:
            made.data = np.ascontiguousarray(np.transpose(tensor.data, order))
            if tensor.scales is not None and len(tensor.scales.scale) > 1:
                axis = order.index(tensor.scales.axis)
                made.scales = Scales(tensor.scales.scale, tensor.scales.zero_point, axis)
            return made
        if is_free(value.shape, value.layout, layout) and made.signature.count(-1) < 2:
            return self._reshape(tensor, made)
        return self.emit("TRANSPOSE", (tensor, self.integers(order, "order")), made)

    def _reshape(self, tensor: Tensor, made: Tensor) -> Tensor:
        sizes = self.integers(made.signature)
        return self.emit("RESHAPE", (tensor, sizes), made, newShape=list(made.signature))

    def reshape(self, tensor: Tensor, shape: Sequence[int], signature: Sequence[int]) -> Tensor:
        """The same values in another shape."""
        made = self.like(tensor, shape, signature=tuple(signature))
        if made.shape == tensor.shape and made.signature == tensor.signature:
            return tensor
        if tensor.data is not None:
            made.data = tensor.data.reshape(made.shape)
            return made
        return self._reshape(tensor, made)

    def dequantize(self, value: Value) -> Value:
        """Integers as floats."""
        key = (id(value.tensor), "float")
        if key not in self._converted:
            made = self.like(
                value.tensor,
                value.tensor.shape,
                signature=value.tensor.signature,
                dtype="FLOAT32",
                scales=None,
            )
            self._keyed.append(value.tensor)
            self.emit("DEQUANTIZE", (value.tensor,), made)
            self._converted[key] = made
        return Value(self._converted[key], value.layout, value.columns)

    def quantize(self, value: Value, scales: Scales, dtype: str) -> Value:
        """Floats as integers, or integers in other steps; the same value where it has these qparams
        already."""
        tensor = value.tensor
        if tensor.scales == scales and tensor.dtype == dtype:
            return value
        key = (id(tensor), (scales, dtype))
        if key not in self._converted:
            made = self.like(
                tensor, tensor.shape, signature=tensor.signature, dtype=dtype, scales=scales
            )
            self._keyed.append(tensor)
            self.emit("QUANTIZE", (tensor,), made)
            self._converted[key] = made
        return Value(self._converted[key], value.layout, value.columns)

    def constant(self, constant: Constant, scales: Scales | None, dtype: str) -> Value:
        """A constant in the file; with ``dtype`` of integers, in steps of ``scales``, else in its own."""
        key = (id(constant), scales, dtype)
        if key not in self._constants:
            self._keyed.append(constant)
            self._constants[key] = (
                quantized_constant(constant, scales, dtype)
                if dtype in _LIMITS
                else constant.tensor()
            )
        tensor = self._constants[key]
        return Value(tensor, plain(len(tensor.shape)))


def quantized_constant(constant: Constant, scales: Scales | None, dtype: str) -> Tensor:
    """Integers of a constant: those that it has, or, in steps of ``scales``, new ones; without, symmetric
    ones whose largest is the dtype's.

    >>> half = Constant("half", torch.tensor([0.5]))
    >>> made = quantized_constant(half, None, "INT8")
    >>> made.data, round(made.scales.scale[0] * 127, 6)
    (array([127], dtype=int8), 0.5)
    """
    low, high = _LIMITS[dtype]
    own = constant.integers is not None and constant.scales is not None
    if own and scales in (None, constant.scales):
        made = constant.integer_tensor()
        if made.dtype == dtype:
            return made
    value = constant.value.detach().double()
    if scales is None:
        most = float(value.abs().max()) if value.numel() else 0.0
        scales = Scales.one(most / high if most > 0 else 1.0, 0)
    steps = torch.round(value / scales.scale[0]) + scales.zero_point[0]
    data = steps.clamp(low, high).numpy().astype(dtype.lower())
    made = constant_tensor(constant.name, np.asarray(data))
    made.scales = scales
    return made
