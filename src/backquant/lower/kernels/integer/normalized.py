"""Softmax and normalisations on integers: tables, exact sums, integer square roots and divisions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from backquant.dtypes import Rounding, interpolated_table
from backquant.lower.kernels.integer.pooling import divided
from backquant.lower.kernels.integer.result import IntegerKernel, Result, steps

_EXP_BITS = 23  # fraction bits of the table of exponentials
_SHARE_BITS = 24  # fraction bits of each exponential divided by their sum
_LARGEST_WITH_ROOT, LARGEST_EPS = 1 << 44, 1 << 61  # in squared steps of the mean


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(Result):
    """Over ``dim``."""

    dim: int
    operator: str = "softmax"


def exponentials(scale: float, dtype: torch.dtype, entries: int | None = None) -> Tensor:
    """``exp(-d * scale)`` for every distance ``d`` of two integers of ``dtype``, in ``2**-23``, int64.

    ``entries``: of a table that interpolates; None: one for each distance.

    >>> exponentials(math.log(2), torch.int8)[:3]
    tensor([8388608, 4194304, 2097152])
    """
    size = 1 << (8 * dtype.itemsize)
    if entries is not None and entries < size:
        unit = 1 << _EXP_BITS
        return interpolated_table(
            lambda d: torch.exp(-d * scale) * unit, 0, size, entries, (0, unit)
        )
    distances = torch.arange(size, dtype=torch.float64)
    return torch.round(torch.exp(-distances * scale) * (1 << _EXP_BITS)).to(torch.int64)


class IntegerSoftmax(IntegerKernel):
    """A table of exponentials by the distance from the largest integer, and one division by their sum.

    ``table``: ``exponentials`` of the input.

    >>> config = SoftmaxConfig(dim=-1, out_scale=2**-8, out_zero_point=0, quant_min=0, quant_max=255,
    ...     integer_dtype=torch.uint8)
    >>> kernel = IntegerSoftmax(config, table=exponentials(math.log(2), torch.uint8))
    >>> kernel(torch.tensor([[9, 8, 8]], dtype=torch.uint8))
    tensor([[128,  64,  64]], dtype=torch.uint8)
    """

    config_class = SoftmaxConfig
    config: SoftmaxConfig
    kernel = "softmax"
    tensor_names = ("table",)
    table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Integers of the result."""
        wide = x.to(torch.int64)
        distance = wide.amax(self.config.dim, keepdim=True) - wide if wide.numel() else wide
        powers = self.table.index_select(0, distance.reshape(-1)).reshape(wide.shape)
        total = powers.sum(self.config.dim, keepdim=True)
        shares = divided(powers << _SHARE_BITS, total, Rounding.HALF_UP)
        return self.config.of_sums(shares, torch.tensor(2.0**-_SHARE_BITS, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class NormConfig(Result):
    """``kind``: layer, group or instance. ``size``: the normalised axes, or the number of groups.

    ``mean_bits``: of a mean, below the steps of the input; ``eps``: in squares of ``2**-mean_bits`` steps of
    the input; ``root_bits``: how much finer than the variance the square root is taken, twice as many;
    ``norm_bits``: of a normalised value, below 1; ``gamma_scale``: the step of the integer factors.
    """

    kind: str
    size: tuple[int, ...]
    eps: int
    root_bits: int
    gamma_scale: float
    mean_bits: int = 8
    norm_bits: int = 10


class IntegerNorm(IntegerKernel):
    """Layer, group and instance norm with statistics of each input.

    Standard deviations are integer square roots; factors are integers of 16 bits (``gamma``), biases
    (``beta``) lie in steps of a factor times a normalised value, one for each normalised place or channel.
    """

    config_class = NormConfig
    config: NormConfig
    kernel = "norm"
    tensor_names = ("gamma", "beta")
    gamma: Tensor
    beta: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Integers of the result, in the shape of ``x``."""
        config = self.config
        if config.kind == "layer":
            rows = x.reshape(-1, math.prod(config.size))
            values = self._normalised(rows).reshape(x.shape)
            spatial = 0
        else:
            groups = config.size[0] if config.kind == "group" else x.shape[1]
            values = self._normalised(
                x.reshape(x.shape[0] * groups, math.prod(x.shape[1:]) // groups)
            ).reshape(x.shape)
            spatial = x.dim() - 2
        gamma, beta = (t.reshape(*t.shape, *[1] * spatial) for t in (self.gamma, self.beta))
        unit = torch.tensor(config.gamma_scale * 2.0**-config.norm_bits, dtype=torch.float64)
        return config.of_sums(values * gamma + beta, unit)

    def _normalised(self, x: Tensor) -> Tensor:
        """Rows less their mean, divided by their deviation, in ``2**-norm_bits``."""
        config, count = self.config, x.shape[-1]
        wide = x.to(torch.int64)
        mean = divided(wide.sum(-1, keepdim=True) << config.mean_bits, count, Rounding.HALF_UP)
        less = (wide << config.mean_bits) - mean
        variance = divided((less * less).sum(-1, keepdim=True), count, Rounding.HALF_UP)
        deviation = square_root((variance + config.eps) << (2 * config.root_bits))
        return divided(less << (config.norm_bits + config.root_bits), deviation, Rounding.HALF_AWAY)

    @property
    def name(self) -> str:
        return f"integer.{self.config.kind}_norm"


def norm_numbers(
    eps: float, scale: float, dtype: torch.dtype, requantization: str = "float"
) -> dict[str, int]:
    """``eps`` and the bits of a ``NormConfig`` for an input of this scale and dtype.

    Where sums are requantized in fixed point, a normalised value times a factor has to fit into 32 bits;
    in ``float`` it has 16 bits, so that results are those of float32 but for near ties.

    >>> norm_numbers(1e-5, 0.5, torch.int8, "fixed_point")
    {'eps': 3, 'root_bits': 8, 'mean_bits': 8, 'norm_bits': 10}
    >>> norm_numbers(1e-5, 0.5, torch.int8)
    {'eps': 671, 'root_bits': 8, 'mean_bits': 12, 'norm_bits': 16}

    Where eps is far larger than the integers' variance, its root needs no bits of its own, and normalised
    values are small, of as many more bits:

    >>> norm_numbers(1e-5, 1e-8, torch.int8)
    {'eps': 1677721600000000000, 'root_bits': 0, 'mean_bits': 12, 'norm_bits': 26}
    """
    narrow, wide = dtype.itemsize == 1, requantization == "float"
    mean_bits = 12 if narrow and wide else 8
    squares = eps / scale**2
    while mean_bits and squares * 4**mean_bits > LARGEST_EPS:
        mean_bits -= 1
    whole = round(squares * 4**mean_bits)
    small = math.floor(math.log2(squares) / 2) - 8 * dtype.itemsize if squares else 0
    return {
        "eps": max(1, whole),
        "root_bits": 8 if narrow and whole <= _LARGEST_WITH_ROOT else 0,
        "mean_bits": mean_bits,
        "norm_bits": (16 if wide else 10) + max(0, small),
    }


def square_root(x: Tensor) -> Tensor:
    """The integer square root, rounded down, of int64 from 0 to ``2**62``.

    >>> square_root(torch.tensor([0, 15, 16, 2**60 - 1]))
    tensor([         0,          3,          4, 1073741823])
    """
    root = torch.sqrt(x.double()).to(torch.int64)
    root = root - (root * root > x).to(torch.int64)
    return root + ((root + 1) * (root + 1) <= x).to(torch.int64)


@dataclass(frozen=True, kw_only=True)
class BatchNormConfig(Result):
    """``gamma_scale``: the step of the integer factors."""

    x_scale: float
    x_zero_point: int
    gamma_scale: float
    operator: str = "batch_norm"


class IntegerBatchNorm(IntegerKernel):
    """Stored statistics: a factor of 16 bits (``gamma``) and a bias (``beta``) for each channel (axis 1)."""

    config_class = BatchNormConfig
    config: BatchNormConfig
    kernel = "batch_norm"
    tensor_names = ("gamma", "beta")
    gamma: Tensor
    beta: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Integers of the result, in the shape of ``x``."""
        config, spatial = self.config, x.dim() - 2
        gamma, beta = (t.reshape(-1, *[1] * spatial) for t in (self.gamma, self.beta))
        unit = torch.tensor(config.x_scale * config.gamma_scale, dtype=torch.float64)
        return config.of_sums(steps(x, config.x_zero_point) * gamma + beta, unit)
