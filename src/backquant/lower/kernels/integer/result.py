"""Requantization of integer sums to the output, and the base class of all kernels of the integer
reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from backquant.dtypes import Requantization, Rounding, requantize_sums, round_to
from backquant.lower.kernels.configured import KernelModule, decode_config

_FAR = 2.0**40  # in steps: outside any range, and within 64 bits


class Term(NamedTuple):
    """``integers`` (int64) times ``real`` (float64, broadcasts), in steps of the result.

    ``headroom``: how many bits the integers may be moved to the left within 32.
    """

    integers: Tensor
    real: Tensor
    headroom: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The qparams of the output, and how sums are requantized to it."""

    out_scale: float
    out_zero_point: int
    quant_min: int
    quant_max: int
    integer_dtype: torch.dtype
    requantization: str = "float"
    rounding: str = "half_even"

    def of_sums(self, sums: Tensor, unit: Tensor) -> Tensor:
        """``sums`` (int64) in steps of ``unit`` (float64, broadcasts over them).

        >>> result = Result(out_scale=0.5, out_zero_point=1, quant_min=0, quant_max=9,
        ...     integer_dtype=torch.uint8)
        >>> result.of_sums(torch.tensor([7, 99]), torch.tensor(0.25, dtype=torch.float64))
        tensor([5, 9], dtype=torch.uint8)
        """
        arithmetic, rounding = Requantization(self.requantization), Rounding(self.rounding)
        return self.of_steps(requantize_sums(sums, unit / self.out_scale, arithmetic, rounding))

    def of_terms(self, terms: Sequence[Term]) -> Tensor:
        """The sum of several terms, each with a scale of its own, rounded once at the end.

        With ``float`` the sum of products in float64. Else as TensorFlow Lite adds: each term is brought to
        a common step of 32 bits, ``2**headroom`` times finer than twice the coarsest, and their sum is
        requantized (``kernels/add.cc``, ``left_shift``).
        """
        arithmetic, rounding = Requantization(self.requantization), Rounding(self.rounding)
        if arithmetic is Requantization.FLOAT:
            total = sum(term.integers.double() * term.real for term in terms)
            assert isinstance(total, Tensor)
            return self.of_steps(round_to(total, rounding).clamp(-_FAR, _FAR).to(torch.int64))
        finer = max(term.headroom for term in terms)
        common = 2 * max(float(term.real.max()) for term in terms)
        sums = torch.zeros((), dtype=torch.int64)
        for term in terms:
            rest = 2.0 ** (finer - term.headroom)
            moved = term.integers << term.headroom
            sums = sums + requantize_sums(moved, term.real * rest / common, arithmetic, rounding)
        unit = torch.tensor(common / 2.0**finer, dtype=torch.float64)
        return self.of_steps(requantize_sums(sums, unit, arithmetic, rounding))

    def of_steps(self, numbers: Tensor) -> Tensor:
        """Whole numbers of steps around the zero point, saturated.

        >>> result = Result(out_scale=1.0, out_zero_point=3, quant_min=0, quant_max=9,
        ...     integer_dtype=torch.uint8)
        >>> result.of_steps(torch.tensor([-5, 2, 50]))
        tensor([0, 5, 9], dtype=torch.uint8)
        """
        moved = numbers + self.out_zero_point
        return moved.clamp(self.quant_min, self.quant_max).to(self.integer_dtype)


def steps(x: Tensor, zero_point: int) -> Tensor:
    """Integers as whole numbers of steps around their zero point, in int64.

    >>> steps(torch.tensor([0, 3], dtype=torch.uint8), 2)
    tensor([-2,  1])
    """
    return x.to(torch.int64) - zero_point


class IntegerKernel(KernelModule):
    """A kernel of the integer reference: a configuration and tensors by name, no state beside them.

    A subclass gives ``config_class``, ``kernel`` (its name) and ``tensor_names``.
    """

    kernel: ClassVar[str]
    tensor_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, **tensors: Tensor | None) -> None:
        super().__init__()
        self.config = config
        for name in self.tensor_names:
            tensor = tensors.get(name)
            self.register_buffer(name, None if tensor is None else tensor.detach())

    @property
    def name(self) -> str:
        return f"integer.{getattr(self.config, 'operator', self.kernel)}"

    @classmethod
    def from_artifact(
        cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor | None]
    ) -> IntegerKernel:
        """Inverse of ``artifact_config()`` and the buffers."""
        return cls(decode_config(cls.config_class, config), **tensors)
