"""Operators of several integer tensors: sums, products, the larger and the smaller, concatenation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backquant.lower.kernels.integer.result import IntegerKernel, Result, Term, steps

_HEADROOM = {1: 20, 2: 15}  # TensorFlow Lite's left_shift of int8 and int16 additions


def headroom_of(dtype: torch.dtype) -> int:
    """How many bits integers of ``dtype`` are moved to the left before they are added.

    >>> headroom_of(torch.int8)
    20
    """
    return _HEADROOM[dtype.itemsize]


@dataclass(frozen=True, kw_only=True)
class BinaryConfig(Result):
    """``operator``: add, sub, mul, matmul, maximum or minimum; ``headroom``: see ``Term``.

    ``is_float``: products times their unit come out, as float32.
    """

    operator: str
    x_scale: float
    x_zero_point: int
    y_scale: float
    y_zero_point: int
    headroom: int = 20
    is_float: bool = False


class IntegerBinary(IntegerKernel):
    """Two integer tensors, which broadcast, to one.

    >>> config = BinaryConfig(operator="add", x_scale=0.5, x_zero_point=0, y_scale=0.25, y_zero_point=4,
    ...     out_scale=0.5, out_zero_point=0, quant_min=-128, quant_max=127, integer_dtype=torch.int8)
    >>> x, y = torch.tensor([2], dtype=torch.int8), torch.tensor([8], dtype=torch.int8)
    >>> IntegerBinary(config)(x, y).item()  # (1.0 + 1.0) / 0.5
    4
    """

    config_class = BinaryConfig
    config: BinaryConfig
    kernel = "binary"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Integers of the result."""
        config = self.config
        one, two = steps(x, config.x_zero_point), steps(y, config.y_zero_point)
        if config.operator in ("mul", "matmul"):
            unit = torch.tensor(config.x_scale * config.y_scale, dtype=torch.float64)
            product = one * two if config.operator == "mul" else _matmul(one, two)
            return (product * unit).float() if config.is_float else config.of_sums(product, unit)
        terms = [
            Term(
                values, torch.tensor(scale / config.out_scale, dtype=torch.float64), config.headroom
            )
            for values, scale in ((one, config.x_scale), (two, config.y_scale))
        ]
        if config.operator in ("maximum", "minimum"):
            choose = getattr(torch, config.operator)
            made: Tensor = choose(*(self._alone(term) for term in terms)).to(config.integer_dtype)
            return made
        if config.operator == "sub":
            terms[1] = terms[1]._replace(integers=-two)
        return config.of_terms(terms)

    def _alone(self, term: Term) -> Tensor:
        """One tensor under the qparams of the result, in int64."""
        return self.config.of_sums(term.integers, term.real * self.config.out_scale).to(torch.int64)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x.double(), y.double()).to(torch.int64)


@dataclass(frozen=True, kw_only=True)
class JoinConfig(Result):
    """``scales`` and ``zero_points`` of the parts; ``fits``: whose integers are taken as they are."""

    operator: str
    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    fits: tuple[bool, ...]
    dim: int


class IntegerJoin(IntegerKernel):
    """Concatenation (``cat``, ``stack``) of integers, those of other qparams rescaled."""

    config_class = JoinConfig
    config: JoinConfig
    kernel = "join"

    def forward(self, parts: list[Tensor]) -> Tensor:
        """Integers of the result."""
        config = self.config
        qparams = zip(parts, config.scales, config.zero_points, config.fits, strict=True)
        found = [part if fits else self._rescaled(part, s, z) for part, s, z, fits in qparams]
        join = torch.cat if config.operator == "cat" else torch.stack
        return join(found, config.dim)

    def _rescaled(self, part: Tensor, scale: float, zero_point: int) -> Tensor:
        unit = torch.tensor(scale, dtype=torch.float64)
        return self.config.of_sums(steps(part, zero_point), unit)
