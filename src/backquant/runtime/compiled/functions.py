"""The kernel functions of a lowered graph in operators that Inductor generates code for.

Each takes the arguments of the kernel that it stands for. Integers become floats, floats are computed with,
and rounded once: within one step of the kernel. What moves, selects or clamps integers is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from backquant.lower.kernels import (
    attention,
    boundary,
    elementwise,
    lookup,
    matrix,
    pooling,
    resize,
    shuffle,
)
from backquant.lower.qdq import dequantize_target, quantize_target
from backquant.runtime.compiled import images


def as_float(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Integers of any shape as floats.

    >>> as_float(torch.tensor([8, 10], dtype=torch.uint8), 0.5, 10)
    tensor([-1.,  0.])
    """
    info = torch.iinfo(x.dtype)
    made: torch.Tensor = dequantize_target()(x, scale, zero_point, info.min, info.max, x.dtype)
    return made


def as_integer(x: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> torch.Tensor:
    """Floats of any shape as integers.

    >>> as_integer(torch.tensor([-9.0, 0.5]), 0.5, 10, torch.uint8)
    tensor([ 0, 11], dtype=torch.uint8)
    """
    info = torch.iinfo(dtype)
    return rounded(x, scale, zero_point, info.min, info.max, dtype)


def rounded(
    x: torch.Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    made: torch.Tensor = quantize_target()(x.float(), scale, zero_point, low, high, dtype)
    return made


def _quantize_input(
    x: torch.Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    """Images change their memory format on the way."""
    if x.dim() == 4 and x.shape[1] == 3 and x.dtype == torch.float32:
        made: torch.Tensor = images.image(x, scale, zero_point)
        return made
    return rounded(x, scale, zero_point, low, high, dtype)


def _dequantize(x: torch.Tensor, scale: float, zero_point: int, *_: Any) -> torch.Tensor:
    return as_float(x, scale, zero_point)


def _requantize(x: torch.Tensor, scale: float, zero_point: int, *out: Any) -> torch.Tensor:
    return rounded(as_float(x, scale, zero_point), *out)


def _clamp(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return torch.clamp(x, low, high)


def _binary(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    def spelled(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        x_scale, x_zero_point, y, y_scale, y_zero_point, scale, zero_point = rest
        found = compute(as_float(x, x_scale, x_zero_point), as_float(y, y_scale, y_zero_point))
        return as_integer(found, scale, zero_point, x.dtype)

    return spelled


def _product(compute: Callable[..., torch.Tensor], relu: bool) -> Callable[..., torch.Tensor]:
    """``_binary``; one number for each channel of an image has a kernel."""
    plain = _binary(compute)

    def spelled(
        x: torch.Tensor,
        x_scale: float,
        x_zero_point: int,
        y: torch.Tensor,
        y_scale: float,
        y_zero_point: int,
        scale: float,
        zero_point: int,
    ) -> torch.Tensor:
        zeros = [float(zero) for zero in (x_zero_point, y_zero_point, zero_point)]
        rest = (x_scale * y_scale / scale, zero_point if relu else 0, 255)
        if images.is_gate(x, y):
            return images.gated(x, y, zeros, *rest)  # type: ignore[no-any-return]
        if images.is_gate(y, x):
            return images.gated(y, x, [zeros[1], zeros[0], zeros[2]], *rest)  # type: ignore[no-any-return]
        return plain(x, x_scale, x_zero_point, y, y_scale, y_zero_point, scale, zero_point)

    return spelled


def _softmax(
    x: torch.Tensor, scale: float, zero_point: int, dim: int, out_scale: float, out_zero_point: int
) -> torch.Tensor:
    found = torch.softmax(as_float(x, scale, zero_point), dim)
    return as_integer(found, out_scale, out_zero_point, x.dtype)


def _cat(
    parts: Sequence[torch.Tensor],
    scales: Sequence[float],
    zero_points: Sequence[int],
    fits: Sequence[bool],
    dim: int,
    *out: Any,
) -> torch.Tensor:
    each = list(zip(parts, scales, zero_points, fits, strict=True))
    scale, zero_point, low, high, _ = out
    if not all(fits) and dim == 1 and all(images.is_image(x) for x in parts):
        ratios = [1.0 if fit else s / scale for _, s, _, fit in each]
        pairs = zip(ratios, each, strict=True)
        shifts = [0.0 if fit else zero_point - z * ratio for ratio, (_, _, z, fit) in pairs]
        return images.joined(list(parts), ratios, shifts, low, high)  # type: ignore[no-any-return]
    return torch.cat([x if fit else _requantize(x, s, z, *out) for x, s, z, fit in each], dim)


def _shuffle(x: torch.Tensor, first: Sequence[int], last: Sequence[int]) -> torch.Tensor:
    if images.is_image(x) and shuffle.swaps_halves(x, first, last):
        return images.shuffled(x)  # type: ignore[no-any-return]
    return x.reshape(tuple(first)).transpose(1, 2).reshape(tuple(last))


def _max_pool(pool: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Integers up to 255 are floats exactly."""

    def spelled(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        made: torch.Tensor = pool(x.float(), *rest).to(x.dtype)
        return made

    return spelled


def _average(pool: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def spelled(x: torch.Tensor, scale: float, zero_point: int, *rest: Any) -> torch.Tensor:
        return as_integer(pool(as_float(x, scale, zero_point), *rest), scale, zero_point, x.dtype)

    return spelled


def _adaptive(pool: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """The mean where there is one result for each channel, which is generated as one loop."""

    def pooled(x: torch.Tensor, size: Sequence[int]) -> Any:
        if all(n == 1 for n in size):
            return x.mean(tuple(range(2, x.dim())), keepdim=True)
        return pool(x, size)

    plain = _average(pooled)

    def spelled(x: torch.Tensor, scale: float, zero_point: int, size: Sequence[int]) -> Any:
        if images.is_image(x) and all(n == 1 for n in size):
            return images.averaged(x)
        return plain(x, scale, zero_point, size)

    return spelled


def _mean(
    x: torch.Tensor, scale: float, zero_point: int, dim: Sequence[int], keepdim: bool
) -> torch.Tensor:
    if images.is_image(x) and sorted(n % 4 for n in dim) == [2, 3]:
        made: torch.Tensor = images.averaged(x)
        return made if keepdim else made.flatten(1)
    return as_integer(
        as_float(x, scale, zero_point).mean(tuple(dim), keepdim), scale, zero_point, x.dtype
    )


def _resize(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    size: Any,
    factor: Any,
    align_corners: Any,
    recompute: Any,
) -> torch.Tensor:
    resized = F.interpolate(
        as_float(x, scale, zero_point), size, factor, "bilinear", align_corners, recompute
    )
    return as_integer(resized, scale, zero_point, x.dtype)


def _attended(*args: Any) -> torch.Tensor:
    return attention.products(*args, rounded=rounded)


def _attended_whole(*args: Any) -> torch.Tensor:
    return attention.whole(*args, rounded=rounded)


def _add_relu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y).relu()


def _mul_relu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).relu()


INPUT = _quantize_input
SPELLINGS: dict[Any, Callable[..., torch.Tensor]] = {
    boundary.quantize: rounded,
    boundary.dequantize: _dequantize,
    boundary.requantize: _requantize,
    boundary.saturate: _clamp,
    boundary.multiply: torch.mul,
    lookup.clamp: _clamp,
    attention.attended: _attended,
    attention.attended_whole: _attended_whole,
    elementwise.add: _binary(torch.add),
    elementwise.add_relu: _binary(_add_relu),
    elementwise.mul: _product(torch.mul, relu=False),
    elementwise.mul_relu: _product(_mul_relu, relu=True),
    boundary.cat: _cat,
    matrix.matmul: _binary(torch.matmul),
    matrix.softmax: _softmax,
    pooling.max_pool1d: _max_pool(F.max_pool1d),
    pooling.max_pool2d: _max_pool(F.max_pool2d),
    pooling.max_pool3d: _max_pool(F.max_pool3d),
    pooling.avg_pool1d: _average(F.avg_pool1d),
    pooling.avg_pool2d: _average(F.avg_pool2d),
    pooling.avg_pool3d: _average(F.avg_pool3d),
    pooling.adaptive_avg_pool1d: _adaptive(F.adaptive_avg_pool1d),
    pooling.adaptive_avg_pool2d: _adaptive(F.adaptive_avg_pool2d),
    pooling.adaptive_avg_pool3d: _adaptive(F.adaptive_avg_pool3d),
    pooling.mean: _mean,
    resize.resize_bilinear: _resize,
    resize.resize_nearest: resize.resize_nearest,
    shuffle.shuffle: _shuffle,
}
