"""Kernels of the integer reference as TOSA operators, computed as the specification says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backquant.conformance.tosa.moves import Graph, NoTosaError, rescaled
from backquant.conformance.tosa.translate import (
    in_our_order,
    translated,
    translated_nearest,
    translated_rescale,
)
from backquant.dtypes import interpolated_table
from backquant.lower.kernels.integer.elementwise import BinaryConfig, IntegerBinary
from backquant.lower.kernels.integer.lookup_tables import IntegerTable, TableConfig, filled, rescale
from backquant.lower.kernels.integer.normalized import IntegerSoftmax, SoftmaxConfig, exponentials
from backquant.lower.kernels.integer.resize import BilinearConfig, IntegerBilinear, nearest
from tosa_in_numpy import evaluated

_HARDWARE = {"requantization": "fixed_point", "rounding": "half_up"}


def result(dtype: torch.dtype, scale: float, zero: int = 0) -> dict[str, Any]:
    info = torch.iinfo(dtype)
    return {
        **{"out_scale": scale, "out_zero_point": zero, "integer_dtype": dtype},
        **{"quant_min": info.min, "quant_max": info.max, **_HARDWARE},
    }


def every(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, dtype=dtype)


def off(kernel: Any, *inputs: torch.Tensor) -> np.ndarray[Any, Any]:
    out = kernel(*inputs)
    graph, output = translated(kernel, inputs, out)
    found = in_our_order(evaluated(graph, output), out, kernel)
    return np.abs(found - out.numpy().astype(np.int64))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.int8, 0.05), (torch.int8, 0.3)])
def test_softmax_of_8_bits_is_the_references(dtype: torch.dtype, scale: float) -> None:
    config = SoftmaxConfig(dim=-1, **result(dtype, 2**-8, -128))
    kernel = IntegerSoftmax(config, table=exponentials(scale, dtype))
    assert not off(kernel, every(dtype, 4, 30, 17)).any()


@pytest.mark.parametrize("scale", [0.0002, 0.001])
def test_softmax_of_16_bits_is_off_by_one_at_most(scale: float) -> None:
    """Its exponentials are those of a table of 513 entries; a reciprocal is not a division."""
    config = SoftmaxConfig(dim=1, **result(torch.int16, 2**-15))
    kernel = IntegerSoftmax(config, table=exponentials(scale, torch.int16, 513))
    differences = off(kernel, every(torch.int16, 4, 17, 30))
    assert differences.max() <= 1 and differences.mean() < 0.01


def test_softmax_of_longer_rows_is_refused() -> None:
    """Their sum has more than 31 bits."""
    config = SoftmaxConfig(dim=-1, **result(torch.int8, 2**-8, -128))
    kernel = IntegerSoftmax(config, table=exponentials(0.05, torch.int8))
    with pytest.raises(NoTosaError, match="more than 255"):
        off(kernel, every(torch.int8, 2, 256))


def test_a_table_of_513_entries_is_tosas() -> None:
    """It is found again in the 65,536 integers that it stands for."""
    table = interpolated_table(
        lambda places: 30000 * torch.sin(places / 9000), -(1 << 15), 1 << 16, 513, (-32768, 32767)
    )
    config = TableConfig(operator="sine", low=-(1 << 15), integer_dtype=torch.int16)
    kernel = IntegerTable(config, table=table.to(torch.int32))
    assert not off(kernel, every(torch.int16, 3000)).any()


def test_a_table_of_each_16_bit_integer_is_refused() -> None:
    table = filled(torch.int16, lambda q: (q.int() * 7919) % 1000)
    kernel = IntegerTable(
        TableConfig(operator="noise", low=-(1 << 15), integer_dtype=torch.int16), table=table
    )
    with pytest.raises(NoTosaError, match="table_entries: 513"):
        off(kernel, every(torch.int16, 4))


def test_limits_of_16_bits_are_a_clamp() -> None:
    table = filled(torch.int16, lambda q: q.int().clamp(0, 9000))
    kernel = IntegerTable(
        TableConfig(operator="relu6", low=-(1 << 15), integer_dtype=torch.int16), table=table
    )
    x = every(torch.int16, 500)
    assert translated(kernel, [x], kernel(x))[0].written() == "CLAMP"
    assert not off(kernel, x).any()


def test_tables_of_channels_are_looked_up_apart() -> None:
    tables = torch.stack([filled(torch.int8, lambda q, n=n: q.int() // n) for n in (1, 2, 3)])
    config = TableConfig(operator="prelu", low=-128, integer_dtype=torch.int8, channels=3)
    kernel = IntegerTable(config, table=tables.reshape(-1))
    assert not off(kernel, every(torch.int8, 2, 3, 50)).any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("operator", ["add", "sub", "mul", "maximum", "minimum"])
def test_two_tensors(operator: str, dtype: torch.dtype) -> None:
    """With 16 bits the headroom is 15."""
    headroom = 20 if dtype is torch.int8 else 15
    scales = {"x_scale": 0.011, "y_scale": 0.02, "headroom": headroom}
    config = BinaryConfig(
        operator=operator, x_zero_point=0, y_zero_point=0, **scales, **result(dtype, 0.033)
    )
    assert not off(IntegerBinary(config), every(dtype, 3, 40), every(dtype, 3, 40)).any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 4.0])
def test_the_nearest_neighbour(factor: float, dtype: torch.dtype) -> None:
    x = every(dtype, 2, 3, 5, 4)

    def move(value: torch.Tensor) -> torch.Tensor:
        return nearest(value, None, factor, "nearest", None)

    graph, output = translated_nearest(move, x)
    assert graph.written() == "SLICE + RESIZE + SLICE + RESIZE + CONCAT"  # image by image
    assert np.array_equal(in_our_order(evaluated(graph, output), move(x), nearest), move(x))


@pytest.mark.parametrize(("aligned", "size"), [(False, [10, 16]), (True, [9, 13]), (True, [5, 4])])
def test_bilinear_interpolation(aligned: bool, size: list[int]) -> None:
    """Factors whose parts have no more than 11 bits; others are off by what the weights are rounded."""
    numbers = {"x_scale": 0.5, "x_zero_point": 3, "recompute_scale_factor": False}
    config = BilinearConfig(**numbers, align_corners=aligned, **result(torch.int8, 0.7, -4))
    kernel = IntegerBilinear(config)
    x = every(torch.int8, 2, 3, 5, 4)
    out = kernel(x, size)
    graph, output = translated(kernel, [x], out)
    found = in_our_order(evaluated(graph, output), out, kernel)
    assert np.array_equal(found, out.numpy())


def test_other_qparams() -> None:
    x = every(torch.int8, 200)
    arguments = (0.5, 3, 0.3, -7, -128, 127, torch.int8, "fixed_point", "half_up")
    out = rescale(x, *arguments)
    graph, output = translated_rescale(x, out, arguments)
    assert np.array_equal(evaluated(graph, output), out.numpy())


def test_sums_of_48_bits_are_multiplied_by_15() -> None:
    """Their constants have six bytes."""
    graph = Graph()
    sums = np.array([-(1 << 40), -5, 1 << 33])
    name = rescaled(
        graph, graph.const(sums, "int48"), (3,), 2.0**-30 * 0.7, "int16", source="int48"
    )
    assert evaluated(graph, name).tolist() == [-717, 0, 6]
