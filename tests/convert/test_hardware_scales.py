"""Scales that the description says that the hardware has: computed, and judged where there is none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
)
from backquant.convert import reference_state
from backquant.errors import InputError
from backquant.nn.quantized import reference


def backend(*, power=None, dtype=torch.qint8) -> BackendConfig:
    tensor = DTypeWithConstraints(dtype, power_of_two_scale=power)
    weight = DTypeWithConstraints(torch.qint8, -127, 127, power_of_two_scale=power)
    config = DTypeConfig(tensor, tensor, weight, torch.float)
    entry = BackendPatternConfig(nn.Conv2d).add_dtype_config(config).set_root_module(nn.Conv2d)
    return BackendConfig("npu").set_backend_pattern_config(
        entry.set_reference_quantized_module(reference.Conv2d)
    )


def asked(qscheme=torch.per_tensor_affine, dtype=torch.qint8) -> backquant.QConfigMapping:
    weight = backquant.PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    )
    activation = backquant.MinMaxObserver.with_args(dtype=dtype, qscheme=qscheme)
    return backquant.QConfigMapping().set_global(backquant.QConfig(activation, weight))


def converted(config: BackendConfig, mapping: backquant.QConfigMapping):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(4, 3, 9, 9).abs()
    prepared = backquant.prepare_fx(model, mapping, x, backend_config=config)
    prepared(x)
    made = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    return model, made, x


@pytest.mark.parametrize("qscheme", [torch.per_tensor_affine, torch.per_tensor_symmetric])
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8])
def test_measured_scales_become_powers_of_two(qscheme, dtype) -> None:
    mapping = asked(qscheme, dtype)
    model, made, x = converted(backend(power=True, dtype=dtype), mapping)
    _, free, _ = converted(backend(dtype=dtype), mapping)
    state, before = reference_state(made), reference_state(free)
    assert all(decision.quantized for decision in state.plan.decisions.values())
    for name, found in state.qparams.items():
        if found.scale is None:
            continue
        scale, was = float(found.scale), float(before.qparams[name].scale)
        assert math.frexp(scale)[0] == 0.5 and was <= scale < 2 * was
        low, high = (
            float((end - found.zero_point) * scale) for end in (found.quant_min, found.quant_max)
        )
        assert low <= 0.51 * scale and high > 0
    scales = made.get_submodule("0").weight_scale
    assert all(math.frexp(float(scale))[0] == 0.5 for scale in scales)
    error = (made(x) - model(x)).pow(2).mean() / model(x).pow(2).mean()
    assert error < 10 ** (-2.5)


def quantized(demand: dict, values: torch.Tensor, dtype=torch.quint8):
    """The qparams of the input of a convolution under a demand on it, and its decision."""
    tensor = DTypeWithConstraints(dtype, **demand)
    entry = BackendPatternConfig(nn.Conv2d).add_dtype_config(
        DTypeConfig(tensor, dtype, torch.qint8, torch.float)
    )
    entry.set_root_module(nn.Conv2d).set_reference_quantized_module(reference.Conv2d)
    config = BackendConfig("npu").set_backend_pattern_config(entry)
    model = nn.Sequential(nn.Conv2d(3, 2, 1)).eval()
    mapping = backquant.get_default_qconfig_mapping(config)
    prepared = backquant.prepare_fx(model, mapping, values, backend_config=config)
    prepared(values)
    state = reference_state(backquant.convert_to_reference_fx(prepared, dialect="decomposed"))
    decision = state.plan.decisions["_0"]
    found = [state.qparams[site.name].number for site in state.sites.sites if site.readers]
    assert len(found) == int(decision.quantized)
    return (found or [None])[0], decision


UP_TO_2 = torch.linspace(0, 2, 3 * 64).reshape(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("demand", "scale"),
    [
        ({"scales": (2**-4, 2**-8, 2**-6)}, 2**-6),
        ({"scales": (2**-9, 2.0 / 255)}, 2.0 / 255),
        ({"scale_range": (None, 2**-9)}, 2**-9),
        ({"scale_range": (2**-3, None)}, 2**-3),
        ({"zero_point_exact_match": 0}, 2.0 / 255),
        ({"zero_point_exact_match": 100}, 2.0 / 155),
        ({"zero_point_exact_match": 0, "power_of_two_scale": True}, 2**-6),
    ],
    ids=str,
)
def test_demands_make_scales(demand: dict, scale: float) -> None:
    found, decision = quantized(demand, UP_TO_2)
    assert decision.quantized and found.scale == pytest.approx(scale, rel=1e-2)
    if "zero_point_exact_match" not in demand:
        assert found.scale == torch.tensor(scale).item()
    assert found.zero_point == demand.get("zero_point_exact_match", 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_take_scales_of_a_set(dtype) -> None:
    found, decision = quantized({"scales": (2**-8, 2**-4, 1.0, 16.0)}, 900 * UP_TO_2, dtype)
    assert decision.quantized
    assert found.scale == {torch.float8_e4m3fn: 16.0, torch.float8_e5m2: 2**-4}[dtype]


def test_what_has_no_room_stays_float(snapshot) -> None:
    _, decision = quantized({"zero_point_exact_match": 0}, UP_TO_2 - 1)
    snapshot("no_room_below_zero", str(decision))
    _, decision = quantized({"scales": (2**-9, 2**-8)}, UP_TO_2)
    snapshot("above_every_scale_of_the_set", str(decision))


def _e2m1(value: float) -> float:
    """The nearest element of the OCP MX specification's table 7, ties to the even mantissa."""
    table = [(0.0, 0), (0.5, 1), (1.0, 0), (1.5, 1), (2.0, 0), (3.0, 1), (4.0, 0), (6.0, 1)]
    distance = [(abs(abs(value) - element), mantissa) for element, mantissa in table]
    return math.copysign(table[distance.index(min(distance))][0], value)


def _blocks(weight: torch.Tensor, size: int) -> list[list[float]]:
    return weight.double().reshape(-1, size).tolist()


def _mx(block: list[float], largest: float, element) -> tuple[float, list[float]]:
    """Algorithm of section 6.3: a shared exponent, then each element rounded and saturated."""
    exponent = math.frexp(max(map(abs, block)))[1] - 1 - (math.frexp(largest)[1] - 1)
    scale = 2.0**exponent
    return scale, [element(max(-largest, min(largest, value / scale))) for value in block]


def _e4m3(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float8_e4m3fn))


def weights_alone(dtype: torch.dtype, size: int, scale_dtype: torch.dtype) -> nn.Module:
    """A linear layer whose weight spans many magnitudes, as a reference module."""
    demand = DTypeWithConstraints(
        dtype, granularity=f"per_group(size={size})", scale_dtype=scale_dtype
    )
    entry = BackendPatternConfig(nn.Linear).add_dtype_config(
        DTypeConfig(torch.float, torch.float, demand)
    )
    entry.set_root_module(nn.Linear).set_reference_quantized_module(reference.Linear)
    config = BackendConfig("npu").set_backend_pattern_config(entry)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 8, bias=False)).eval()
    with torch.no_grad():
        model[0].weight.mul_(torch.exp2(torch.randint(-9, 9, (8, 128)).float()))
    observer = backquant.observe.BlockMinMaxObserver.with_args(
        granularity=f"per_group(size={size})", dtype=dtype, qscheme=torch.per_channel_symmetric
    )
    floats = backquant.PlaceholderObserver.with_args(dtype=torch.float)
    mapping = backquant.QConfigMapping().set_global(backquant.QConfig(floats, observer))
    made = backquant.quantize(model, torch.randn(1, 128), backend=config, qconfig_mapping=mapping)
    return model, made.graph_module.get_submodule("0")


@pytest.mark.parametrize(
    ("dtype", "largest", "element"),
    [(torch.float4_e2m1fn_x2, 6.0, _e2m1), (torch.float8_e4m3fn, 448.0, _e4m3)],
    ids=["mxfp4", "mxfp8"],
)
def test_mx_formats(dtype: torch.dtype, largest: float, element) -> None:
    model, layer = weights_alone(dtype, 32, torch.float8_e8m0fnu)
    wanted = [_mx(block, largest, element) for block in _blocks(model[0].weight.detach(), 32)]
    assert layer.weight_scale.flatten().tolist() == [scale for scale, _ in wanted]
    assert _blocks(layer.weight, 32) == [elements for _, elements in wanted]
    floats = [[scale * element for element in elements] for scale, elements in wanted]
    assert _blocks(layer.get_weight(), 32) == floats


def test_nvfp4() -> None:
    model, layer = weights_alone(torch.float4_e2m1fn_x2, 16, torch.float8_e4m3fn)
    blocks = _blocks(model[0].weight.detach(), 16)
    unit = max(abs(value) for block in blocks for value in block) / 6 / 448
    for block, scale, found in zip(
        blocks, layer.weight_scale.flatten().tolist(), _blocks(layer.weight, 16), strict=True
    ):
        wanted = max(_e4m3(max(map(abs, block)) / 6 / unit), 2**-9) * unit
        assert scale == pytest.approx(wanted, rel=1e-6)
        assert found == [_e2m1(max(-6, min(6, value / scale))) for value in block]


def activations(dtype: torch.dtype, size: int, scale_dtype: torch.dtype, x: torch.Tensor):
    """What a linear layer reads whose input is quantized in groups at each call: values, scales, floats."""
    demand = DTypeWithConstraints(
        dtype, granularity=f"per_group(size={size})", scale_dtype=scale_dtype
    )
    entry = BackendPatternConfig(nn.Linear).add_dtype_config(
        DTypeConfig(demand, torch.float, demand, is_dynamic=True)
    )
    entry.set_root_module(nn.Linear).set_reference_quantized_module(reference.Linear)
    config = BackendConfig("npu").set_backend_pattern_config(entry)
    assert config.validate() == []
    name = str(dtype).removeprefix("torch.")
    made = backquant.quantize(
        nn.Sequential(nn.Linear(128, 8)).eval(), x, backend=config, weights=name, group_size=size
    )
    seen: dict[str, object] = {}

    class Watched(torch.fx.Interpreter):
        def run_node(self, node):
            seen[str(node.target)] = found = super().run_node(node)
            return found

    with torch.no_grad():
        Watched(made.graph_module).run(x)
    values, scale, _ = seen["backquant.quantize_blocks.default"]
    return values, scale, seen["backquant.dequantize_blocks.default"]


def many_magnitudes() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(4, 128) * torch.exp2(torch.randint(-9, 9, (4, 128)).float())
    return x.index_fill_(0, torch.tensor([3]), 0.0)


@pytest.mark.parametrize(
    ("dtype", "largest", "element"),
    [(torch.float4_e2m1fn_x2, 6.0, _e2m1), (torch.float8_e4m3fn, 448.0, _e4m3)],
    ids=["mxfp4", "mxfp8"],
)
def test_mx_activations(dtype: torch.dtype, largest: float, element) -> None:
    """The weights' algorithm, at each call; zeros stay zeros."""
    x = many_magnitudes()
    values, scale, floats = activations(dtype, 32, torch.float8_e8m0fnu, x)
    wanted = [_mx(block, largest, element) for block in _blocks(x[:3], 32)]
    assert scale[:3].flatten().tolist() == [scale for scale, _ in wanted]
    assert _blocks(values[:3], 32) == [elements for _, elements in wanted]
    assert _blocks(floats[:3], 32) == [[s * one for one in elements] for s, elements in wanted]
    assert not floats[3].any()


def test_nvfp4_activations() -> None:
    x = many_magnitudes()
    values, scale, _ = activations(torch.float4_e2m1fn_x2, 16, torch.float8_e4m3fn, x)
    unit = float(x.abs().max()) / 6 / 448
    for block, one, found in zip(
        _blocks(x[:3], 16), scale[:3].flatten().tolist(), _blocks(values[:3], 16), strict=True
    ):
        wanted = max(_e4m3(max(map(abs, block)) / 6 / unit), 2**-9) * unit
        assert one == pytest.approx(wanted, rel=1e-6)
        assert found == [_e2m1(max(-6, min(6, value / one))) for value in block]


def test_groups_that_do_not_divide_a_call(snapshot) -> None:
    with pytest.raises(InputError) as raised:
        torch.ops.backquant.quantize_blocks(
            torch.ones(2, 48), "per_group(size=32)", -448, 448, 1e-9, torch.float8_e4m3fn
        )
    snapshot("blocks_that_do_not_divide", str(raised.value))


BY_HAND = {
    "sizes that are": lambda *_: torch.ops.backquant.quantize_blocks(
        torch.ones(2, 64), "per_group(size=32)", -448, 448, 1e-9, torch.float8_e4m3fn
    ),
}
