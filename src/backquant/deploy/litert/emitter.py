"""Writes operators into a network: layouts, conversions between dtypes, and constants, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from backquant.deploy.litert.lowered_values import (
    CHANNELS_LAST,
    Constant,
    Dequantized,
    Layout,
    UnsupportedError,
    Value,
    constant_tensor,
    hints,
    is_free,
    plain,
    signature_of,
    sizes_of,
    stored,
)
from backquant.deploy.litert.network import Array, Network, Operation, Scales, Tensor, dtype_name

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
        """Append one operator; its output. The interpreter crashes where a list of axes, or another constant
        operand, has no values; it has sizes of none for results without axes."""
        if code != "RESHAPE" and any(t is not None and _is_empty(t.data) for t in inputs):
            raise UnsupportedError(f"{code} with a constant without values")
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


def _is_empty(data: Array | None) -> bool:
    return data is not None and not data.size


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


# One operator of the program as the rules see it: arguments by name, operands as tensors of the file.


@dataclass(frozen=True)
class Rule:
    """How one operator is written.

    ``integer``: whether there is a kernel on integers for a call. ``keeps``: that kernel's result has the
    qparams of its input. ``moves``: its values are those of its operands, so that
    integers stay integers whatever reads them. ``fuses``: the kernel clamps its result.
    """

    write: Callable[[Call], Value]
    integer: Callable[[Call], bool] = lambda call: False  # noqa: ARG005
    keeps: bool | Callable[[Call], bool] = False
    moves: bool = False
    fuses: bool = False


Table = dict[Any, Rule]


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema, defaults included."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return dict(enumerate(node.args))  # type: ignore[arg-type]
    made = {}
    for index, argument in enumerate(target._schema.arguments):
        if index < len(node.args):
            made[argument.name] = node.args[index]
        else:
            made[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return made


@dataclass(eq=False)
class Call:
    """One call. ``integer``: it computes on integers, and its result has ``scales`` and ``dtype``;
    ``activation``: the clamp that its kernel applies."""

    node: fx.Node
    emitter: Emitter
    values: dict[fx.Node, Any]
    integer: bool = False
    scales: Scales | None = None
    dtype: str = ""
    activation: str = "NONE"
    columns_allowed: bool = False
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.args = bound_arguments(self.node)

    # -- what it reads --------------------------------------------------------------------------------

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument that is no tensor; sizes are numbers."""
        value = hints(self.args.get(name))
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether there is such an operand."""
        return self.args.get(name) is not None

    def constant(self, name: str) -> Constant | None:
        """The operand, if it depends on no input."""
        found = self.held(self.args.get(name))
        return found if isinstance(found, Constant) else None

    def held(self, argument: Any) -> Any:
        """What an argument stands for; a number is a constant."""
        if isinstance(argument, fx.Node):
            return self.values.get(argument)
        if isinstance(argument, (bool, int, float)):
            return Constant("number", torch.tensor(argument, dtype=self._number_dtype()))
        return None

    def _number_dtype(self) -> torch.dtype:
        for source in self.node.all_input_nodes:
            value = source.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
                return value.dtype
        return torch.float32

    def read(self, name: str, scales: Scales | None = None) -> Value:
        """An operand in the arithmetic of the call: integers (in steps of ``scales``, where those are
        named), or floats."""
        return self.read_argument(self.args[name], scales)

    def read_argument(self, argument: Any, scales: Scales | None = None) -> Value:
        """``read`` of an operand of a list."""
        found = self.held(argument)
        if found is None:
            raise UnsupportedError(f"an operand that is no tensor: {argument}")
        if self.integer:
            return self._integers(found, scales)
        return self.floats(found)

    def _integers(self, found: Any, scales: Scales | None) -> Value:
        if isinstance(found, Constant):
            return self.emitter.constant(found, scales, self.dtype)
        value = found.integers if isinstance(found, Dequantized) else found
        if scales is None or value.scales is None:
            return value
        return self.emitter.quantize(value, scales, self.dtype)

    def floats(self, found: Any) -> Value:
        """A value as the float program has it."""
        if isinstance(found, Constant):
            return self._constant_in_float(found)
        if isinstance(found, Dequantized):
            if found.floats is None:
                found.floats = self.emitter.dequantize(found.integers)
            return found.floats
        if not isinstance(found, Value):
            raise UnsupportedError("an operand that is no tensor")
        return found

    def _constant_in_float(self, found: Constant) -> Value:
        """Integers of many values stay integers in the file."""
        integers = found.integers
        compact = integers is not None and integers.dtype == torch.int8 and found.scales is not None
        if compact and found.value.numel() > _SMALL:
            return self.emitter.dequantize(self.emitter.constant(found, found.scales, "INT8"))
        return self.emitter.constant(found, None, "")

    # -- what it gives --------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the result, in PyTorch's order."""
        return sizes_of(self.node)

    @property
    def signature(self) -> tuple[int, ...]:
        """The same with -1 for free sizes."""
        return signature_of(self.node)

    def output(self, layout: Layout | None = None) -> Tensor:
        """A new tensor for the result."""
        layout = plain(len(self.shape)) if layout is None else layout
        dtype = self.dtype if self.integer else _dtype(self.node)
        return Tensor(
            self.node.name,
            stored(self.shape, layout),
            stored(self.signature, layout),
            dtype,
            self.scales if self.integer else None,
        )

    def emit(
        self,
        code: str,
        inputs: Sequence[Tensor | None],
        layout: Layout | None = None,
        **options: Any,
    ) -> Value:
        """Write the operator that gives the result."""
        made = self.output(layout)
        self.emitter.emit(code, inputs, made, **options)
        return Value(made, plain(len(made.shape)) if layout is None else layout)


_SMALL = 1024


def _dtype(node: fx.Node) -> str:
    value = node.meta["val"]
    if value.dtype in (torch.float64, torch.bfloat16):
        return "FLOAT32"
    if value.dtype not in _KNOWN:
        raise UnsupportedError(f"values of {value.dtype}")
    return dtype_name(value.dtype)


_KNOWN = (
    *(torch.float32, torch.float16, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.bool),
)


# Images as kernels read them: batch, height, width, channels; lines are images of height 1.

_LINES = (0, 2, 1)
_ACTIVATIONS = {"NONE": 0, "RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3}


def activation(call: Call) -> int:
    """The clamp of a kernel, by the schema's number."""
    return _ACTIVATIONS[call.activation]


def pair(value: Any, rank: int, of_lines: int = 1) -> tuple[int, int]:
    """One or two numbers as those of height and width; ``of_lines``: that of the height of a line.

    >>> pair([2], 4), pair([2], 3), pair(3, 3, of_lines=0)
    ((2, 2), (1, 2), (0, 3))
    """
    numbers = [value] if isinstance(value, int) else list(value)
    if rank == 3:
        return of_lines, int(numbers[-1])
    return int(numbers[0]), int(numbers[-1])


def image(call: Call, value: Value) -> Tensor:
    """A value of three or four axes with its channels last."""
    rank = len(value.shape)
    if rank == 4:
        return call.emitter.laid(value, CHANNELS_LAST)
    if rank != 3:
        raise UnsupportedError(f"images of {rank} axes")
    lines = call.emitter.laid(value, _LINES)
    shape, signature = lines.shape, lines.signature
    return call.emitter.reshape(lines, (shape[0], 1, *shape[1:]), (signature[0], 1, *signature[1:]))


def from_image(call: Call, tensor: Tensor, rank: int) -> Value:
    """The inverse of ``image``."""
    if rank == 4:
        return Value(tensor, CHANNELS_LAST)
    shape, signature = tensor.shape, tensor.signature
    lines = call.emitter.reshape(tensor, (shape[0], *shape[2:]), (signature[0], *signature[2:]))
    return Value(lines, _LINES)


def image_output(call: Call) -> Tensor:
    """A tensor for the result of a kernel of images."""
    if len(call.shape) == 4:
        return call.output(CHANNELS_LAST)
    made = call.output(_LINES)
    made.shape = (made.shape[0], 1, *made.shape[1:])
    made.signature = (made.signature[0], 1, *made.signature[1:])
    return made
