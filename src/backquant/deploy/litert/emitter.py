"""What rules write with: values and where their axes lie, an emitter of operators, and the calls to write.

The emitter writes operators into a network: changes of layout, conversions between dtypes, and constants,
each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from backquant.deploy.edits import arguments, overload_named
from backquant.deploy.litert.network import (
    DTYPES,
    LIMITS,
    Array,
    Free,
    Network,
    Operation,
    Scales,
    Tensor,
)
from backquant.errors import ExportError

# Where the axes of a value lie in memory.
#
# A layout is a tuple: for each axis of the stored tensor the axis of PyTorch's tensor that lies there.
# ``(0, 2, 3, 1)`` is channels last. Permutations of PyTorch's graph change the layout and move nothing; an
# operator that needs another one asks for it, and only then a transpose is written.

Layout = tuple[int, ...]
CHANNELS_LAST: Layout = (0, 2, 3, 1)


def plain(rank: int) -> Layout:
    """PyTorch's own order.

    >>> plain(3)
    (0, 1, 2)
    """
    return tuple(range(rank))


def last(rank: int, axis: int) -> Layout:
    """PyTorch's order with ``axis`` moved to the end.

    >>> last(4, 1)
    (0, 2, 3, 1)
    """
    return (*(each for each in range(rank) if each != axis), axis)


def stored(sizes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Sizes in PyTorch's order as they are stored.

    >>> stored((1, 3, 8, 9), CHANNELS_LAST)
    (1, 8, 9, 3)
    """
    return tuple(sizes[axis] for axis in layout)


def logical(sizes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The inverse of ``stored``.

    >>> logical((1, 8, 9, 3), CHANNELS_LAST)
    (1, 3, 8, 9)
    """
    made = [0] * len(layout)
    for size, axis in zip(sizes, layout, strict=True):
        made[axis] = size
    return tuple(made)


def permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout of ``x.permute(order)`` where ``x`` has ``layout``.

    >>> permuted(CHANNELS_LAST, (0, 2, 3, 1))
    (0, 1, 2, 3)
    """
    place = {axis: index for index, axis in enumerate(order)}
    return tuple(place[axis] for axis in layout)


def without(layout: Layout, axes: Sequence[int]) -> Layout:
    """The layout when ``axes`` are gone.

    >>> without(CHANNELS_LAST, (2, 3))
    (0, 1)
    """
    kept = sorted(axis for axis in layout if axis not in axes)
    names = {axis: index for index, axis in enumerate(kept)}
    return tuple(names[axis] for axis in layout if axis in names)


def is_free(sizes: Sequence[int], before: Layout, after: Layout) -> bool:
    """Whether going from one layout to the other moves axes of size 1 only. ``sizes``: in PyTorch's order.

    >>> is_free((1, 8, 1, 1), (0, 1, 2, 3), CHANNELS_LAST), is_free((1, 8, 2, 1), (0, 1, 2, 3), CHANNELS_LAST)
    (True, False)
    """
    return [a for a in before if sizes[a] != 1] == [a for a in after if sizes[a] != 1]


def reshaped(sizes: Sequence[int], layout: Layout, wanted: Sequence[int]) -> Layout | None:
    """The layout of the tensor reshaped to ``wanted`` sizes, if the values can stay where they are.

    Both shapes are cut into groups of axes with equal products; groups may lie in any order, the axes within
    one may not.

    >>> reshaped((1, 8, 7, 7), CHANNELS_LAST, (1, 8, 49))
    (0, 2, 1)
    >>> reshaped((1, 8, 7, 7), CHANNELS_LAST, (1, 392)) is None
    True
    """
    groups = _groups(sizes, wanted)
    if groups is None or _by_group(layout, groups) != [axis for axis in layout if sizes[axis] != 1]:
        return None
    place = {axis: index for index, axis in enumerate(layout)}
    made: list[int] = []
    for _, after in sorted(groups, key=lambda group: min(place[a] for a in group[0])):
        made.extend(after)
    for axis in (axis for axis in range(len(wanted)) if wanted[axis] == 1):
        made.insert(min(axis, len(made)), axis)
    return tuple(made)


def ordered_for(sizes: Sequence[int], layout: Layout, wanted: Sequence[int]) -> Layout:
    """The layout that ``reshaped`` takes, as near to ``layout`` as can be: axes of a group lie together.

    >>> ordered_for((1, 2, 4, 7, 7), (0, 3, 4, 2, 1), (1, 8, 7, 7))
    (0, 3, 4, 1, 2)
    """
    groups = _groups(sizes, wanted)
    if groups is None:
        return plain(len(layout))
    made = _by_group(layout, groups)
    for axis in (axis for axis in range(len(sizes)) if sizes[axis] == 1):
        made.insert(min(layout.index(axis), len(made)), axis)
    return tuple(made)


def _by_group(layout: Layout, groups: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """Axes of more than one value, groups in the order in which their first axis lies."""
    place = {axis: index for index, axis in enumerate(layout)}
    ordered = sorted(groups, key=lambda group: min(place[axis] for axis in group[0]))
    return [axis for before, _ in ordered for axis in before]


def _groups(
    sizes: Sequence[int], wanted: Sequence[int]
) -> list[tuple[list[int], list[int]]] | None:
    """Axes of one shape, and those of the other with the same product, from the front; axes of size 1 of
    ``wanted`` are in none.

    >>> _groups((2, 3, 4), (6, 4))
    [([0, 1], [0]), ([2], [1])]
    """
    left = [axis for axis, size in enumerate(sizes) if size != 1]
    right = [axis for axis, size in enumerate(wanted) if size != 1]
    if 0 in (*sizes, *wanted):
        return None
    found = []
    while left or right:
        one: list[int] = []
        two: list[int] = []
        a = b = 1
        while not one or a != b:
            if (a <= b or not right) and left:
                one.append(left.pop(0))
                a *= sizes[one[-1]]
            elif right:
                two.append(right.pop(0))
                b *= wanted[two[-1]]
            else:
                return None
        found.append((one, two))
    return found


class UnsupportedError(Exception):
    """An operator that the format cannot express; the words say what of it. ``node``: which it is, if one."""

    node: fx.Node | None = None


@dataclass(eq=False)
class Value:
    """A tensor of the file. ``layout``: see above. ``columns``: of a value that only linear layers
    read, where each value of its last axis comes from."""

    tensor: Tensor
    layout: Layout
    columns: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in PyTorch's order."""
        return logical(self.tensor.shape, self.layout)


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

    def integer_tensor(self) -> Tensor:
        """Its integers in the file."""
        assert self.integers is not None
        made = constant_tensor(self.name, as_array(self.integers))
        made.scales = self.scales
        return made


def as_array(value: torch.Tensor) -> Array:
    """A tensor as the array that a file holds: numbers of 64 bits in 32."""
    value = value.detach().cpu()
    if value.dtype in (torch.float64, torch.bfloat16):
        value = value.float()
    if value.is_complex():
        raise UnsupportedError("complex numbers")
    return np.asarray(value.contiguous().numpy())


def constant_tensor(name: str, data: Array) -> Tensor:
    """A constant of the file.

    >>> constant_tensor("a", np.zeros((2, 3), np.int32)).dtype
    'INT32'
    """
    return Tensor(name, data.shape, data.dtype.name.upper(), data=data)


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
    """The sizes of a node's tensor for the example inputs; those that are free are ``Free``."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise ExportError(f"{node.name} is no tensor", where="export")
    return tuple(
        size
        if isinstance(size, int)
        else int(size.node.expr)
        if size.node.expr.is_number
        else Free(size.node.hint)
        for size in value.shape
    )


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
        held = [t.data for t in inputs if t is not None and t.data is not None]
        if code != "RESHAPE" and not all(data.size for data in held):
            raise UnsupportedError(f"{code} with a constant without values")
        self.network.operations.append(
            Operation(code, tuple(inputs), (output,), options, self.node)
        )
        return output

    def same(self, code: str, *inputs: Tensor, **options: Any) -> Tensor:
        """Append one operator whose output is as its first input."""
        return self.emit(code, inputs, self.like(inputs[0]), **options)

    def like(self, source: Tensor, shape: Sequence[int] | None = None, **changes: Any) -> Tensor:
        """A new tensor with the dtype and qparams of ``source``; of its shape, where none is named."""
        made = replace(source, data=None, **changes)
        made.shape = source.shape if shape is None else tuple(shape)
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

    def number(self, value: float, dtype: str = "", name: str = "number") -> Tensor:
        """A constant of one number."""
        return self.constant(Constant(name, torch.tensor(value)), None, dtype).tensor

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
        made = self.like(tensor, stored(value.shape, layout))
        if tensor.data is not None:
            made.data = np.ascontiguousarray(np.transpose(tensor.data, order))
            if tensor.scales is not None and len(tensor.scales.scale) > 1:
                axis = order.index(tensor.scales.axis)
                made.scales = Scales(tensor.scales.scale, tensor.scales.zero_point, axis)
            return made
        if is_free(value.shape, value.layout, layout) and made.signature.count(-1) < 2:
            return self.copied(tensor, made)
        return self.emit("TRANSPOSE", (tensor, self.integers(order, "order")), made)

    def copied(self, tensor: Tensor, made: Tensor) -> Tensor:
        """``made``, as a reshape of ``tensor``."""
        sizes = self.integers(made.signature)
        return self.emit("RESHAPE", (tensor, sizes), made, newShape=list(made.signature))

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The same values in another shape."""
        made = self.like(tensor, shape)
        if made.signature == tensor.signature and made.shape == tensor.shape:
            return tensor
        if tensor.data is not None:
            made.data = tensor.data.reshape(made.shape)
            return made
        return self.copied(tensor, made)

    def widened(self, value: Value, rank: int) -> Value:
        """The same values with axes of size 1 in front, ``rank`` in all, in PyTorch's order; as they are
        where there are as many."""
        missing = rank - len(value.shape)
        if not missing:
            return value
        tensor = self.laid(value, plain(len(value.shape)))
        return Value(self.reshape(tensor, (*(1,) * missing, *tensor.shape)), plain(rank))

    def dequantize(self, value: Value) -> Value:
        """Integers as floats."""
        return self._as(value, "DEQUANTIZE", None, "FLOAT32")

    def quantize(self, value: Value, scales: Scales, dtype: str) -> Value:
        """Floats as integers, or integers in other steps; the same value where it has these qparams
        already."""
        if value.tensor.scales == scales and value.tensor.dtype == dtype:
            return value
        return self._as(value, "QUANTIZE", scales, dtype)

    def _as(self, value: Value, code: str, scales: Scales | None, dtype: str) -> Value:
        key = (id(value.tensor), (scales, dtype))
        if key not in self._converted:
            self._keyed.append(value.tensor)
            made = self.like(value.tensor, dtype=dtype, scales=scales)
            self._converted[key] = self.emit(code, (value.tensor,), made)
        return Value(self._converted[key], value.layout, value.columns)

    def constant(self, constant: Constant, scales: Scales | None, dtype: str) -> Value:
        """A constant in the file; with ``dtype`` of integers, in steps of ``scales``, else in its own."""
        key = (id(constant), scales, dtype)
        if key not in self._constants:
            self._keyed.append(constant)
            self._constants[key] = (
                quantized_constant(constant, scales, dtype)
                if dtype in LIMITS
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
    low, high = LIMITS[dtype]
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

Write = Callable[["Call"], Value]
Fits = Callable[["Call"], bool]


def never(_: Call) -> bool:
    """Of operators without a kernel on integers."""
    return False


def always(_: Call) -> bool:
    """Of operators whose kernel on integers takes every call."""
    return True


@dataclass(frozen=True)
class Rule:
    """How one operator is written.

    ``integer``: whether there is a kernel on integers for a call. ``keeps``: that kernel's result has the
    qparams of its input. ``moves``: its values are those of its operands, so that
    integers stay integers whatever reads them. ``fuses``: the kernel clamps its result.
    """

    write: Write
    integer: Fits = never
    keeps: bool | Fits = False
    moves: bool = False
    fuses: bool = False


class Table(dict[Any, Rule]):
    """Rules by overload. An operator is named ``"add"``, which is its usual overload, or ``"add.Scalar"``."""

    def add(self, names: str, write: Write, integer: Fits = never, **traits: Any) -> None:
        """One rule for the operators of these ``names``."""
        self.update(
            dict.fromkeys(map(overload_named, names.split()), Rule(write, integer, **traits))
        )

    def rule(self, names: str, integer: Fits = never, **traits: Any) -> Callable[[Write], Write]:
        """The same, as a decorator of what writes them."""

        def register(write: Write) -> Write:
            self.add(names, write, integer, **traits)
            return write

        return register

    def moves(self, names: str) -> Callable[[Write], Write]:
        """The same for operators that move values, on integers, too."""
        return self.rule(names, always, keeps=True, moves=True)


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
        is_aten = isinstance(self.node.target, torch._ops.OpOverload)
        self.args = arguments(self.node) if is_aten else {}

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

    @property
    def source(self) -> Value:
        """``read`` of the first operand."""
        return self.read("input" if "input" in self.args else "self")

    def read(self, name: str, scales: Scales | None = None) -> Value:
        """An operand in the arithmetic of the call: integers (in steps of ``scales``, where those are
        named), or floats."""
        return self.read_argument(self.args[name], scales)

    def read_argument(self, argument: Any, scales: Scales | None = None) -> Value:
        """``read`` of an operand of a list."""
        found = self.held(argument)
        if found is None:
            raise UnsupportedError(f"an operand that is no tensor: {argument}")
        if not self.integer:
            return self.floats(found)
        if isinstance(found, Constant):
            return self.emitter.constant(found, scales, self.dtype)
        value: Value = found.integers if isinstance(found, Dequantized) else found
        if scales is None or value.tensor.scales is None:
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

    def output(self, layout: Layout | None = None) -> Tensor:
        """A new tensor for the result."""
        shape = self.shape if layout is None else stored(self.shape, layout)
        if self.integer:
            return Tensor(self.node.name, shape, self.dtype, self.scales)
        return Tensor(self.node.name, shape, _dtype(self.node))

    def emit(
        self,
        code: str,
        inputs: Sequence[Tensor | None],
        layout: Layout | None = None,
        **options: Any,
    ) -> Value:
        """Write the operator that gives the result."""
        made = self.emitter.emit(code, inputs, self.output(layout), **options)
        return Value(made, plain(len(made.shape)) if layout is None else layout)


_SMALL = 1024


def _dtype(node: fx.Node) -> str:
    dtype = node.meta["val"].dtype
    if dtype in (torch.float64, torch.bfloat16):
        return "FLOAT32"
    if dtype not in DTYPES:
        raise UnsupportedError(f"values of {dtype}")
    return DTYPES[dtype]


# Images as kernels read them: batch, height, width, channels; lines are images of height 1.

_LINES = (0, 2, 1)
_ACTIVATIONS = {"NONE": 0, "RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3}


def activation(call: Call) -> int:
    """The clamp of a kernel, by the schema's number."""
    return _ACTIVATIONS[call.activation]


def window_options(call: Call, stride: Sequence[int], padding: int) -> dict[str, Any]:
    """What kernels of windows have in common; ``padding``: the schema's number."""
    return {
        "padding": padding,
        "strideH": stride[0],
        "strideW": stride[1],
        "fusedActivationFunction": activation(call),
    }


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
    return call.emitter.reshape(lines, (lines.shape[0], 1, *lines.shape[1:]))


def from_image(call: Call, tensor: Tensor, rank: int) -> Value:
    """The inverse of ``image``."""
    if rank == 4:
        return Value(tensor, CHANNELS_LAST)
    lines = call.emitter.reshape(tensor, (tensor.shape[0], *tensor.shape[2:]))
    return Value(lines, _LINES)


def image_output(call: Call) -> Tensor:
    """A tensor for the result of a kernel of images."""
    if len(call.shape) == 4:
        return call.output(CHANNELS_LAST)
    made = call.output(_LINES)
    made.shape = (made.shape[0], 1, *made.shape[1:])
    return made
