"""Kernels of the integer reference beside arithmetic that is not ours: ONNX Runtime's kernels, TensorFlow
Lite's definitions in Python's whole numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from backquant.lower.kernels.integer.elementwise import BinaryConfig, IntegerBinary
from backquant.lower.kernels.integer.normalized import (
    IntegerNorm,
    IntegerSoftmax,
    NormConfig,
    SoftmaxConfig,
    exponentials,
    norm_numbers,
    square_root,
)
from backquant.lower.kernels.integer.pooling import AverageConfig, IntegerAverage
from backquant.lower.kernels.integer.weighted import IntegerWeighted, WeightedConfig

_ONNX = {torch.uint8: TensorProto.UINT8, torch.int8: TensorProto.INT8}
ROUNDINGS = ("half_even", "half_up", "half_away")
ARITHMETICS = ("float", "fixed_point", "fixed_point_twice")


def result(scale: float, zero_point: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    info = torch.iinfo(dtype)
    return {
        "out_scale": scale,
        "out_zero_point": zero_point,
        "quant_min": info.min,
        "quant_max": info.max,
        "integer_dtype": dtype,
        **more,
    }


def integers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random ones, the ends of the range among them."""
    info = torch.iinfo(dtype)
    made = torch.randint(info.min, info.max + 1, shape)
    made.view(-1)[:2] = torch.tensor([info.min, info.max])
    return made.to(dtype)


def run_onnx(domain: str, operator: str, inputs: list[Any], **attributes: Any) -> np.ndarray:
    """One node in ONNX Runtime, as it stands."""
    names = [f"i{n}" for n in range(len(inputs))]
    arrays = [np.asarray(value) for value in inputs]
    node = helper.make_node(operator, names, ["y"], domain=domain, **attributes)
    typed = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, arrays, strict=True)
    ]
    out = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph([node], "g", typed, [out])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: np.ndarray = session.run(None, dict(zip(names, arrays, strict=True)))[0]
    return found


def weighted(operator: str, x: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
    """With scales 2**-3 and 2**-4 of input and weight, whose zero points are 7 and 0."""
    bias = torch.arange(weight.shape[0])
    out = result(more.pop("out_scale", 2.0**3), -5 if x.dtype == torch.int8 else 5, x.dtype)
    dims = weight.dim() - 2
    geometry = {"stride": (2,) * dims, "padding": (1,) * dims, "dilation": (1,) * dims}
    config = WeightedConfig(**out, operator=operator, x_zero_point=7, **geometry, **more)
    zero, unit = torch.zeros(1, dtype=torch.int64), torch.tensor([2.0**-7], dtype=torch.float64)
    kernel = IntegerWeighted(config, weight=weight, weight_zero_point=zero, bias=bias, unit=unit)
    return kernel(x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_onnxruntime_weighted(dtype: torch.dtype) -> None:
    """Scales are powers of two: its products in float32 are exact, ties among them."""
    torch.manual_seed(0)
    image, kernel = integers(dtype, 2, 4, 9, 9), integers(torch.int8, 6, 2, 3, 3)
    bias = np.arange(6, dtype=np.int32)
    zero = dtype == torch.uint8
    zeros = [np.array(z, image.numpy().dtype) for z in (7, 5 if zero else -5)]
    scales = [np.float32(s) for s in (2**-3, 2**-4, 2**3)]
    inputs = [image, scales[0], zeros[0], kernel, scales[1], np.int8(0), scales[2], zeros[1], bias]
    theirs = run_onnx("", "QLinearConv", inputs, strides=[2, 2], pads=[1, 1, 1, 1], group=2)
    assert np.array_equal(theirs, weighted("conv2d", image, kernel, groups=2).numpy())
    assert len(np.unique(theirs)) > 20

    rows, matrix = integers(dtype, 5, 64), integers(torch.int8, 6, 64)
    inputs = [
        rows,
        scales[0],
        zeros[0],
        matrix.t().contiguous(),
        scales[1],
        np.int8(0),
        scales[2],
        zeros[1],
    ]
    theirs = run_onnx("", "QLinearMatMul", inputs)
    config = WeightedConfig(
        **result(2.0**3, int(zeros[1]), dtype), operator="linear", x_zero_point=7
    )
    unit = torch.tensor([2.0**-7], dtype=torch.float64)
    ours = IntegerWeighted(
        config, weight=matrix, weight_zero_point=torch.zeros(1, dtype=torch.int64), unit=unit
    )
    assert np.array_equal(theirs, ours(rows).numpy())


@pytest.mark.parametrize("operator", ["Add", "Mul"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_onnxruntime_elementwise(operator: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = integers(dtype, 400), integers(dtype, 400)
    zeros = [np.array(z, x.numpy().dtype) for z in (3, 9, 20)]
    scales = [np.float32(s) for s in (2**-4, 2**-5, 2**-3)]
    inputs = [x, scales[0], zeros[0], y, scales[1], zeros[1], scales[2], zeros[2]]
    theirs = run_onnx("com.microsoft", f"QLinear{operator}", inputs)
    config = BinaryConfig(
        **result(2.0**-3, 20, dtype), operator=operator.lower(), x_scale=2.0**-4, x_zero_point=3,
        y_scale=2.0**-5, y_zero_point=9,
    )  # fmt: skip
    assert np.array_equal(theirs, IntegerBinary(config)(x, y).numpy())


def doubling_high(a: int, b: int) -> int:
    """gemmlowp's SaturatingRoundingDoublingHighMul."""
    if a == b == -(1 << 31):
        return (1 << 31) - 1
    nudged = a * b + ((1 << 30) if a * b >= 0 else 1 - (1 << 30))
    return nudged // (1 << 31) if nudged >= 0 else -(-nudged // (1 << 31))


def by_power(x: int, exponent: int) -> int:
    """gemmlowp's RoundingDivideByPOT."""
    mask = (1 << exponent) - 1
    threshold = (mask >> 1) + (1 if x < 0 else 0)
    return (x >> exponent) + (1 if (x & mask) > threshold else 0)


def multiplied(x: int, real: float) -> int:
    """TensorFlow Lite's QuantizeMultiplier and MultiplyByQuantizedMultiplier."""
    mantissa, shift = math.frexp(real)
    fixed = math.floor(mantissa * (1 << 31) + 0.5)
    if fixed == 1 << 31:
        fixed, shift = fixed // 2, shift + 1
    return by_power(doubling_high(x << max(shift, 0), fixed), max(-shift, 0))


@pytest.mark.parametrize(("dtype", "left"), [(torch.int8, 20), (torch.int16, 15)])
def test_tensorflow_lite_addition(dtype: torch.dtype, left: int) -> None:
    """``reference/add.h``: both moved to the left, each by its multiplier, the sum by that of the output."""
    torch.manual_seed(1)
    x, y = integers(dtype, 300), integers(dtype, 300)
    one, two, out = 0.0371, 0.0113, 0.0402
    zero = 5 if dtype == torch.int8 else 0
    config = BinaryConfig(
        **result(out, -3, dtype, requantization="fixed_point_twice"), operator="add", x_scale=one,
        x_zero_point=zero, y_scale=two, y_zero_point=-zero, headroom=left,
    )  # fmt: skip
    twice = 2 * max(one, two)
    info = torch.iinfo(dtype)
    wanted = []
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        parts = (
            multiplied((a - zero) << left, one / twice),
            multiplied((b + zero) << left, two / twice),
        )
        total = multiplied(sum(parts), twice / ((1 << left) * out)) - 3
        wanted.append(min(max(total, info.min), info.max))
    assert IntegerBinary(config)(x, y).tolist() == wanted


def test_tensorflow_lite_average() -> None:
    """``reference/integer_ops/pooling.h``: the sum of the integers, half away from zero."""
    x = integers(torch.int8, 50, 4)
    config = AverageConfig(
        **result(0.5, 3, torch.int8, rounding="half_away"), operator="mean", x_scale=0.5,
        x_zero_point=3, dim=(1,),
    )  # fmt: skip
    wanted = [int(math.copysign((abs(s) + 2) // 4, s)) for s in x.long().sum(1).tolist()]
    assert IntegerAverage(config)(x).tolist() == wanted


@settings(max_examples=30)
@given(st.data())
def test_linear_layers_by_whole_numbers(data: st.DataObject) -> None:
    """Any dtype, arithmetic and scale, at the ends of the ranges; sums beyond 32 bits saturate."""
    dtype = data.draw(st.sampled_from([torch.int8, torch.uint8, torch.int16]))
    info, rows = torch.iinfo(dtype), data.draw(st.sampled_from([1, 3, 700]))
    ends = st.sampled_from([info.min, info.max, 0, 1])
    x = torch.tensor([[data.draw(ends) for _ in range(4)] * rows], dtype=dtype)
    weight = torch.tensor([[data.draw(st.sampled_from([-128, 127, 1])) for _ in range(4)] * rows])
    zero, bias = data.draw(st.integers(-9, 9)), data.draw(st.integers(-(2**31), 2**31 - 1))
    real = data.draw(st.floats(2.0**-28, 0.99))
    arithmetic = data.draw(st.sampled_from(ARITHMETICS))
    rounding = data.draw(st.sampled_from(ROUNDINGS))
    fields = result(1.0, 1, dtype, requantization=arithmetic, rounding=rounding)
    config = WeightedConfig(**fields, operator="linear", x_zero_point=zero)
    kernel = IntegerWeighted(
        config, weight=weight.to(torch.int8), weight_zero_point=torch.zeros(1, dtype=torch.int64),
        bias=torch.tensor([bias]), unit=torch.tensor([real], dtype=torch.float64),
    )  # fmt: skip
    total = sum((a - zero) * w for a, w in zip(x[0].tolist(), weight[0].tolist(), strict=True))
    total = min(max(total + bias, -(2**31)), 2**31 - 1)
    made = _requantized(total, real, arithmetic, rounding) + 1
    assert kernel(x).item() == min(max(made, info.min), info.max)


def _requantized(total: int, real: float, arithmetic: str, rounding: str) -> int:
    if arithmetic == "fixed_point_twice":
        return multiplied(total, real)
    if arithmetic == "float":
        return _rounded(*(total * real).as_integer_ratio(), rounding)
    mantissa, shift = math.frexp(real)
    fixed = math.floor(mantissa * (1 << 31) + 0.5)
    return _rounded(total * fixed, 1 << (31 - shift), rounding)


def _rounded(over: int, under: int, rounding: str) -> int:
    floor, rest = divmod(over, under)
    if 2 * rest != under:
        return floor + (2 * rest > under)
    up = {"half_even": floor % 2 == 1, "half_up": True, "half_away": over >= 0}[rounding]
    return floor + up


@settings(max_examples=30)
@given(st.integers(0, 2**60), st.integers(-3, 3))
def test_square_root(root: int, near: int) -> None:
    value = min(max((root >> 30) ** 2 + near, 0), 2**60)
    assert square_root(torch.tensor([value])).item() == math.isqrt(value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_softmax_and_layer_norm_within_a_step(dtype: torch.dtype) -> None:
    """Beside float64, on rows from flat to one that stands out."""
    torch.manual_seed(0)
    x = integers(dtype, 40, 48)
    x[0], x[1] = 5, torch.iinfo(dtype).min
    x[1, 3] = torch.iinfo(dtype).max
    scale = 0.05 if dtype == torch.int8 else 0.0004
    real = x.double() * scale
    table = exponentials(scale, dtype)
    softmax = SoftmaxConfig(**result(2.0**-8, 0, torch.uint8), dim=-1)
    made = IntegerSoftmax(softmax, table=table)(x).double() * 2.0**-8
    assert (made - torch.softmax(real, -1).clamp(max=255 / 256)).abs().max() <= 0.51 * 2.0**-8

    gamma, beta = torch.linspace(-2, 2, 48).double(), torch.linspace(-1, 1, 48).double()
    wanted = torch.nn.functional.layer_norm(real, (48,), gamma, beta, 1e-5)
    step = float(wanted.abs().max()) / 127
    unit = 2 / 32767
    for requantization, most in (("float", 0.502), ("fixed_point", 0.6)):
        numbers = norm_numbers(1e-5, scale, dtype, requantization)
        made = result(step, 0, torch.int8) | {"requantization": requantization}
        config = NormConfig(**made, **numbers, kind="layer", size=(48,), gamma_scale=unit)
        shift = torch.round(beta / unit * 2 ** numbers["norm_bits"]).long()
        kernel = IntegerNorm(config, gamma=torch.round(gamma / unit).long(), beta=shift)
        assert (kernel(x).double() * step - wanted).abs().max() <= most * step
