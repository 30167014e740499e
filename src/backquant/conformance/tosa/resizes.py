"""Interpolation as RESIZE, for images ``[batch, height, width, channels]``."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from backquant.conformance.tosa.graph import Array, Graph
from backquant.conformance.tosa.scales import NoTosaError, rescaled
from backquant.lower.kernels.integer.resize import IntegerBilinear

_SUMS = {"int8": "int32", "int16": "int48"}
_LARGEST = 1 << 11  # of the numbers that a scale is a ratio of


def nearest(graph: Graph, x: Array, out: Array, places: Sequence[Array]) -> str:
    """The nearest neighbour; ``places``: which line and column each of the result is.

    TOSA rounds where PyTorch takes the whole part, so that a place begins half a step further down.
    """
    axes = []
    for given, place in zip(x.shape[2:], places, strict=True):
        size = len(place)
        times = size // given
        if size % given or not np.array_equal(place, np.arange(size) // times):
            raise NoTosaError("the nearest neighbour by a factor that is not whole")
        axes.append((2 * times, 2, 1 - times, times - 1))
    return _resize(graph, x, out, axes, "NEAREST", out.dtype.name)


def bilinear(graph: Graph, kernel: IntegerBilinear, inputs: Sequence[Array], out: Array) -> str:
    config, x = kernel.config, inputs[0]
    if config.scale_factor and not config.align_corners and not config.recompute_scale_factor:
        factors: Sequence[Any] = (config.scale_factor * 2)[:2]
    else:
        factors = (None, None)
    axes = [
        _centred(given, size, factor) if not config.align_corners else _aligned(given, size)
        for given, size, factor in zip(x.shape[2:], out.shape[2:], factors, strict=True)
    ]
    wide = _SUMS[out.dtype.name]
    sums = _resize(graph, x, out, axes, "BILINEAR", wide)
    parts = axes[0][0] * axes[1][0]
    shape = _shape(out)
    if config.x_zero_point or config.out_zero_point:  # on int32: 16-bit values have none
        zero = graph.const(np.full([1] * 4, config.x_zero_point * parts), wide)
        sums = graph.add("SUB", [sums, zero], shape, wide)
    real = config.x_scale / config.out_scale / parts
    return rescaled(
        graph, sums, shape, real, out.dtype.name, source=wide, out_zero=config.out_zero_point
    )


def _centred(given: int, size: int, factor: Any) -> tuple[int, int, int, int]:
    """Scale (two numbers), offset and border, where places are those of the middles of values."""
    ratio = Fraction(size, given) if factor is None else Fraction(float(factor)).limit_denominator()
    numerator, denominator = 2 * ratio.numerator, 2 * ratio.denominator
    offset = ratio.denominator - ratio.numerator
    border = denominator * (size - 1) - (given - 1) * numerator + offset
    return _admitted(numerator, denominator, offset, border)


def _aligned(given: int, size: int) -> tuple[int, int, int, int]:
    """As ``_centred``, where the first and the last values stay where they are."""
    if min(given, size) == 1:
        return _admitted(1, 1, 0, size - given)
    ratio = Fraction(size - 1, given - 1)
    return _admitted(ratio.numerator, ratio.denominator, 0, 0)


def _admitted(
    numerator: int, denominator: int, offset: int, border: int
) -> tuple[int, int, int, int]:
    fits = numerator <= _LARGEST and denominator < 16 * numerator
    if (
        not fits
        or not -numerator <= offset < 16 * numerator
        or not -16 * numerator <= border < numerator
    ):
        raise NoTosaError(f"a factor of {numerator} / {denominator}")
    return numerator, denominator, offset, border


def _resize(  # size: the numbers of the operator
    graph: Graph,
    x: Array,
    out: Array,
    axes: Sequence[tuple[int, int, int, int]],
    mode: str,
    dtype: str,
) -> str:
    if x.ndim != 4:
        raise NoTosaError("interpolation of something else than images")
    scale = [each for axis in axes for each in axis[:2]]
    shapes = [graph.shape(each) for each in (scale, [a[2] for a in axes], [a[3] for a in axes])]
    last = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    given, shape = graph.given(last), _shape(out)
    if len(x) == 1 or mode == "BILINEAR":
        return graph.add("RESIZE", [given, *shapes], shape, dtype, mode=mode)
    one, image = [1, *shape[1:]], [1, *last.shape[1:]]
    found = []
    for number in range(len(x)):  # Ethos-U55 takes one image
        part = [graph.shape([number, 0, 0, 0]), graph.shape(image)]
        each = graph.add("SLICE", [given, *part], image, x.dtype.name)
        found.append(graph.add("RESIZE", [each, *shapes], one, dtype, mode=mode))
    return graph.add("CONCAT", found, shape, dtype, axis=0)


def _shape(out: Array) -> list[int]:
    return list(np.moveaxis(out, 1, -1).shape)
