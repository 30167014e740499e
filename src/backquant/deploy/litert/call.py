"""One operator of the program as the rules see it: arguments by name, operands as tensors of the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from backquant.deploy.litert.emitter import Emitter
from backquant.deploy.litert.layouts import Layout, plain, stored
from backquant.deploy.litert.lowered_values import (
    Constant,
    Dequantized,
    UnsupportedError,
    Value,
    hints,
    signature_of,
    sizes_of,
)
from backquant.deploy.litert.network import Scales, Tensor, dtype_name

__all__ = ["Call", "Rule", "Table", "bound_arguments"]


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
