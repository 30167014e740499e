"""How the 32-bit sums of a kernel become its results: scale, shift, activation, bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from backquant.native.instructions import AMX, AVX512_VNNI, capabilities_here

_LIMIT = 3.0e38
_SHORT_GELU = 64 * 1.2e-5  # its error is a 64th of a step then
_ACTIVATIONS = {
    ("swish", ""): "SWISH",
    ("hardswish", ""): "HARDSWISH",
    ("gelu", "none"): "GELU",
    ("gelu", "tanh"): "GELU_TANH",
    ("tanh", ""): "TANH",
    ("leaky_relu", ""): "LEAKY",
}


class Weights(Protocol):
    """int8 ``weight`` ``[out, ...]``, float32 ``scale`` ``[out]``; ``folded``: the bias that makes up for the
    zero point of the input."""

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def scale(self) -> torch.Tensor: ...
    def folded(self, x_scale: float, zero_point: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Result:
    """The dtype, qparams and activation of what a convolution or linear layer returns: the last arguments of
    its operator.
    """

    scale: float
    zero_point: int
    dtype: torch.dtype
    post_op: str
    numbers: Any
    algorithm: str

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            *(self.scale, self.zero_point, self.dtype),
            *(self.post_op, list(self.numbers), self.algorithm),
        )

    @property
    def is_known(self) -> bool:
        """Whether our kernels can compute such a result, on some CPU."""
        known = self.post_op in ("none", "relu", "hardtanh") or self.activation is not None
        return known and self.dtype in (torch.uint8, torch.float32)

    @property
    def has_kernel(self) -> bool:
        """Whether our kernels can compute such a result on this CPU."""
        return self.is_known and has_kernels()

    @property
    def activation(self) -> str | None:
        found = _ACTIVATIONS.get((self.post_op, self.algorithm))
        short = found == "GELU" and self.dtype == torch.uint8 and self.scale >= _SHORT_GELU
        return "GELU_BYTES" if short else found

    def as_floats(self) -> Result:
        """The value before its post-op."""
        return Result(1.0, 0, torch.float32, "none", [], "")

    @property
    def range(self) -> tuple[float, float]:
        """Bounds of the integers, or of the floats."""
        return (0.0, 255.0) if self.dtype == torch.uint8 else (-_LIMIT, _LIMIT)

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of the result, with those of a clamping post-op."""
        low, high = self.range
        if self.post_op == "relu":
            return max(low, float(self.zero_point)), high
        if self.post_op == "hardtanh":
            first, last = (bound / self.scale + self.zero_point for bound in self.numbers)
            return min(max(first, low), high), max(min(last, high), low)
        return low, high


def has_kernels() -> bool:
    """Whether this CPU has AVX-512 VNNI, for which ``compile()`` writes its kernels."""
    return AVX512_VNNI.is_on(torch.cpu.get_capabilities())


def has_tiles() -> bool:
    """Whether this CPU has AMX, and the system lets this process use it: ``tiles.h``."""
    return AMX.is_on(capabilities_here())


@dataclass(frozen=True)
class Epilogue:
    """``scale`` and ``shift`` by channel, in the kernel's order."""

    result: Result
    scale: torch.Tensor
    shift: torch.Tensor
    other: tuple[float, int] | None = None

    @property
    def activation(self) -> str:
        """The activation of the kernel; ``NONE`` where the result is bounded by its dtype alone."""
        found = self.result.activation
        return found or ("NONE" if self.result.bounds == self.result.range else "CLAMP")

    @property
    def clamps(self) -> bool:
        return self.result.activation is None

    @property
    def unit(self) -> float:
        """The unit of the scaled sums: steps of the result, or real values where an activation function
        follows.
        """
        return self.result.scale if self.clamps else 1.0

    def adding(self, scale: float, zero_point: int) -> Epilogue:
        """The epilogue with a tensor of these qparams added."""
        shift = self.shift - zero_point * (scale / self.unit)
        return replace(self, shift=shift, other=(scale / self.unit, zero_point))

    @property
    def numbers(self) -> tuple[float, ...]:
        """Those of ``Epilogue`` in ``kernels.h``, from ``other_scale`` on."""
        result = self.result
        low, high = result.bounds if self.clamps else result.range
        return (
            0.0 if self.other is None else self.other[0],
            *(low, high),
            *((1.0, 0.0) if self.clamps else (1.0 / result.scale, float(result.zero_point))),
            float(next(iter(result.numbers), 0.0)) if result.post_op == "leaky_relu" else 0.0,
        )

    @property
    def code(self) -> str:
        other = "nullptr" if self.other is None else "other"
        literals = ", ".join(f"{number!r}f" for number in self.numbers)
        return f"const backquant::Epilogue e{{scale, shift, {other}, {literals}}};"


def epilogue(
    result: Result,
    weights: Weights,
    x_scale: float,
    zero_point: int,
    order: Callable[[torch.Tensor], torch.Tensor],
) -> Epilogue:
    """The epilogue of an operator on an input with these qparams."""
    made = Epilogue(result, weights.scale, weights.scale)
    scale = weights.scale.double() * (x_scale / made.unit)
    shift = weights.folded(x_scale, zero_point).double() / made.unit
    if made.clamps:
        shift = shift + result.zero_point
    return replace(made, scale=order(scale.float()), shift=order(shift.float()))
