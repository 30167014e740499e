from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig, get_backend_config
from backquant.errors import EngineError
from backquant.observe import BlockMinMaxObserver
from backquant.pipeline.mappings import weight_only_mapping
from backquant.qconfig import QConfigMapping, default_dynamic_qconfig

NPU = """
schema_version: 1
name: npu
engine: integer_reference
dtype_configs:
  int8:
    input_dtype: {{dtype: qint8, symmetric: true, power_of_two_scale: {power}}}
    output_dtype: {{dtype: qint8, symmetric: true, power_of_two_scale: {power}}}
    weight_dtype: {{dtype: qint8, symmetric: true, quant_min_lower_bound: -127, power_of_two_scale: {power}}}
    bias_dtype: {bias}
    bias_scale: input_times_weight
    requantization: {requantization}
    rounding: {rounding}
  values:
    input_dtype: {{dtype: qint8, symmetric: true, power_of_two_scale: {power}}}
    output_dtype: {{dtype: qint8, symmetric: true, power_of_two_scale: {power}}}
    requantization: {requantization}
    rounding: {rounding}
entries:
- operators: [conv2d, linear]
  dtype_configs: [int8]
- operators: [add, relu, flatten]
  dtype_configs: [values]
"""


def described(folder: Path, requantization: str, bias: str = "int32") -> BackendConfig:
    path = folder / f"{requantization}.yaml"
    power = str(requantization == "shift").lower()
    rounding = "half_away" if requantization == "fixed_point_twice" else "half_up"
    path.write_text(
        NPU.format(requantization=requantization, power=power, bias=bias, rounding=rounding)
    )
    return BackendConfig.load(path)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5))


@pytest.mark.parametrize("requantization", ["fixed_point", "fixed_point_twice", "shift"])
def test_equal_to_the_reference_model(tmp_path: Path, requantization: str) -> None:
    """Where the description names the arithmetic, both compute the same integers."""
    config = described(tmp_path, requantization)
    x = torch.randn(2, 3, 8, 8)
    integer = backquant.quantize(model(), x, backend=config, calibration=[x])
    reference = backquant.quantize(model(), x, backend=config.set_engine(None), calibration=[x])
    assert {use.kernel for use in integer.kernels} >= {"integer.conv2d", "integer.linear"}
    assert integer.left_in_float == () and reference.engine is None
    assert torch.equal(integer(x), reference(x)) and integer.report.coverage == 1.0


def test_biases_of_64_bits_have_sums_of_40(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    bits = [
        made.get_submodule("0").config.accumulator_bits
        for made in (
            backquant.quantize(model(), x, backend=described(tmp_path, "float", b), calibration=[x])
            for b in ("int32", "int64")
        )
    ]
    assert bits == [32, 40]


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 64)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear(x, self.weight, self.bias))


def converted(layers: nn.Module, x: torch.Tensor, mapping: QConfigMapping, config: BackendConfig):
    """The reference model, and the integer reference, which is saved and loaded."""
    prepared = backquant.prepare_fx(layers.eval(), mapping, x, backend_config=config)
    prepared(x)
    reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    return reference, backquant.convert_to_integer_reference(prepared)


AT_EACH_CALL = {
    "module": (nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4)), "x86", 2),
    "function": (Function(), "x86", 1),
    "tokens, weights in groups": (nn.Sequential(nn.Linear(64, 16), nn.ReLU()), "xnnpack", 1),
}


@pytest.mark.parametrize("name", AT_EACH_CALL)
def test_what_is_quantized_at_each_call(name: str, tmp_path: Path) -> None:
    """Exact sums of the reference model's integers, where that adds floats."""
    torch.manual_seed(0)
    layers, backend, count = AT_EACH_CALL[name]
    x, config = torch.randn(3, 64), get_backend_config(backend)
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    if "groups" in name:
        mapping = weight_only_mapping(config, "int4", 32)
    reference, integer = converted(layers, x, mapping, config)
    assert [use.kernel for use in integer.kernels] == ["integer.linear_at_each_call"] * count
    assert integer.left_in_float == ()
    torch.testing.assert_close(integer(x), reference(x), rtol=1e-5, atol=1e-5)
    backquant.save(integer, tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(x), integer(x))


AT_EACH_CALL_SPEC = """
schema_version: 1
name: calls
dtype_configs:
  weighted:
    input_dtype: quint8
    output_dtype: float32
    weight_dtype: {dtype: qint8, symmetric: true}
    is_dynamic: true
  products: {input_dtype: quint8, output_dtype: float32, is_dynamic: true}
  rows: {input_dtype: {dtype: int8, granularity: per_token}, output_dtype: float32, is_dynamic: true}
entries:
- {operators: [conv1d, conv2d, conv2d+relu, conv3d, conv_transpose2d], dtype_configs: [weighted]}
- {operators: [matmul], dtype_configs: [products, rows]}
"""


class ConvFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight, self.bias, stride=2, padding=1)


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv1d": (nn.Sequential(nn.Conv1d(6, 4, 3, padding=1)), (2, 6, 9)),
    "conv2d": (nn.Sequential(nn.Conv2d(6, 4, 3, groups=2, dilation=2), nn.ReLU()), (2, 6, 8, 8)),
    "conv3d": (nn.Sequential(nn.Conv3d(2, 4, 2)), (1, 2, 4, 4, 4)),
    "conv_transpose2d": (nn.Sequential(nn.ConvTranspose2d(6, 4, 2, 2, groups=2)), (2, 6, 4, 4)),
    "function": (ConvFunction(), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_at_each_call(name: str, by_channel: bool, tmp_path: Path) -> None:
    """Beside sums of integers that are written out here."""
    torch.manual_seed(0)
    layers, shape = CONVOLUTIONS[name]
    x, path = torch.randn(shape), tmp_path / "calls.yaml"
    path.write_text(AT_EACH_CALL_SPEC)
    weight = backquant.MinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
    )
    if by_channel:
        weight = backquant.PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            ch_axis=int("transpose" in name),
        )
    given = backquant.PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True)
    mapping = QConfigMapping().set_global(backquant.QConfig(given, weight))
    config = BackendConfig.load(path)
    reference, integer = converted(layers, x, mapping, config)
    kind = "conv2d" if name == "function" else name
    assert [use.kernel for use in integer.kernels] == [f"integer.{kind}_at_each_call"]
    torch.testing.assert_close(integer(x), reference(x), rtol=1e-5, atol=1e-5)
    backquant.save(integer, tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(x), integer(x))
    if name == "function":
        return
    held: Any = reference.get_submodule("0")
    module = held[0] if isinstance(held, nn.Sequential) else held
    scale = (max(float(x.max()), 0.0) - min(float(x.min()), 0.0)) / 255
    zero_point = round(-min(float(x.min()), 0.0) / scale)
    steps = (torch.round(x / scale) + zero_point).clamp(0, 255) - zero_point
    exact: Any = type(layers[0])(**_geometry(layers[0])).double()
    exact.weight = nn.Parameter(module.weight.double())
    unit = scale * module.weight_scale.double().reshape(-1)
    unit = unit.repeat(4 // unit.numel()) if unit.numel() > 1 else unit
    wanted = exact(steps.double()) * unit.reshape(-1, *[1] * (x.dim() - 2))
    wanted = wanted + layers[0].bias.double().reshape(-1, *[1] * (x.dim() - 2))
    wanted = wanted.clamp(min=0) if len(layers) > 1 else wanted
    torch.testing.assert_close(integer(x).double(), wanted, rtol=1e-5, atol=1e-5)


def _geometry(layer: nn.Module) -> dict[str, object]:
    names = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
    )
    return {"bias": False} | {name: getattr(layer, name) for name in names}


class Product(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, y)


def test_products_of_activations_at_each_call(tmp_path: Path) -> None:
    """Both matrices are quantized; with a scale for each row there is no sum of integers of the second."""
    torch.manual_seed(0)
    path, pair = tmp_path / "calls.yaml", (torch.randn(2, 3, 8), torch.randn(2, 8, 5))
    path.write_text(AT_EACH_CALL_SPEC)
    weight = backquant.observe.default_weight_observer
    made = {}
    for dtype, more in ((torch.quint8, {}), (torch.int8, {"granularity": "per_token"})):
        given = backquant.PlaceholderObserver.with_args(dtype=dtype, is_dynamic=True, **more)
        mapping = QConfigMapping().set_global(backquant.QConfig(given, weight))
        config = BackendConfig.load(path)
        prepared = backquant.prepare_fx(Product().eval(), mapping, pair, backend_config=config)
        reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
        chosen = [n for n in reference.graph.nodes if "choose_qparams" in str(n.target)]
        assert len(chosen) == 2
        if dtype is torch.int8:
            with pytest.raises(EngineError, match="each row of the second matrix"):
                backquant.convert_to_integer_reference(prepared)
            continue
        integer = backquant.convert_to_integer_reference(prepared)
        assert [use.kernel for use in integer.kernels] == ["integer.matmul_at_each_call"]
        made = {"integer": integer(*pair), "reference": reference(*pair)}
        backquant.save(integer, tmp_path / "m.bq")
        assert torch.equal(backquant.load(tmp_path / "m.bq")(*pair), integer(*pair))
    torch.testing.assert_close(made["integer"], made["reference"], rtol=1e-5, atol=1e-5)
    noise = (made["integer"] - torch.matmul(*pair)).square().sum() / made["integer"].square().sum()
    assert 1e-6 < float(noise) < 1e-2


GROUPS = """
schema_version: 1
name: groups
dtype_configs:
  int8:
    input_dtype: qint8
    output_dtype: qint8
    weight_dtype: {dtype: int4, granularity: per_group(size=16)}
    bias_dtype: float32
    requantization: ARITHMETIC
entries:
- operators: [linear, linear+relu]
  dtype_configs: [int8]
"""


@pytest.mark.parametrize("arithmetic", ["float", "fixed_point"])
def test_weights_in_groups(arithmetic: str, tmp_path: Path, snapshot: Callable[..., None]) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(32, 64), tmp_path / "groups.yaml"
    path.write_text(GROUPS.replace("ARITHMETIC", arithmetic))
    weight = BlockMinMaxObserver.with_args(dtype=torch.int4, granularity="per_group(size=16)")
    activation = backquant.MinMaxObserver.with_args(dtype=torch.qint8)
    mapping = QConfigMapping().set_global(backquant.QConfig(activation, weight))
    layers, config = (
        nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4)),
        BackendConfig.load(path),
    )
    if arithmetic != "float":
        with pytest.raises(EngineError) as caught:
            converted(layers, x, mapping, config)
        snapshot("groups_in_fixed_point", str(caught.value))
        return
    reference, integer = converted(layers, x, mapping, config)
    assert [use.kernel for use in integer.kernels] == ["integer.linear_in_groups"] * 2
    assert integer.left_in_float == () and torch.equal(integer(x), reference(x))
    backquant.save(integer, tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(x), integer(x))


def test_what_has_no_integer_arithmetic_is_refused(snapshot: Callable[..., None]) -> None:
    mapping = QConfigMapping().set_global(backquant.qconfig.float16_dynamic_qconfig)
    x = torch.randn(2, 4)
    with pytest.raises(EngineError) as caught:
        converted(nn.Sequential(nn.Linear(4, 4)), x, mapping, get_backend_config("x86"))
    snapshot("no_integer_reference", str(caught.value))


class Slopes(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.prelu(x, self.weight)


@pytest.mark.parametrize("count", [1, 3])
def test_slopes_of_a_function(count: int, tmp_path: Path) -> None:
    path, x = tmp_path / "slopes.yaml", torch.randn(2, 3, 4, 4)
    path.write_text(TABLES.format(entries="null").replace("int16", "int8"))
    config = BackendConfig.load(path)
    mapping = backquant.get_default_qconfig_mapping(config)
    reference, integer = converted(Slopes(count), x, mapping, config)
    assert [use.kernel for use in integer.kernels] == ["integer.table(prelu)"]
    assert torch.equal(integer(x), reference(x))


TABLES = """
schema_version: 1
name: tables
engine: integer_reference
dtype_configs:
  int16:
    input_dtype: {{dtype: int16, symmetric: true}}
    output_dtype: {{dtype: int16, symmetric: true}}
    table_entries: {entries}
entries:
- operators: [sigmoid, gelu, prelu, softmax]
  dtype_configs: [int16]
"""


@pytest.mark.parametrize(
    "layer", [nn.Sigmoid(), nn.GELU(), nn.PReLU(3), nn.Softmax(-1)], ids=lambda m: type(m).__name__
)
def test_tables_with_fewer_entries_interpolate(tmp_path: Path, layer: nn.Module) -> None:
    """Off by what a line between two neighbours is; saved and loaded the same."""
    torch.manual_seed(0)
    x = 4 * torch.randn(4, 3, 64)
    made = {}
    for entries in (None, 513, 65536):
        path = tmp_path / f"{entries}.yaml"
        path.write_text(TABLES.format(entries=entries or "null"))
        made[entries] = backquant.quantize(
            nn.Sequential(layer).eval(), x, backend=str(path), calibration=[x]
        )
    whole, few = made[None](x), made[513](x)
    assert torch.equal(whole, made[65536](x))
    step = float(whole.abs().max()) / 32767
    assert 0 < float((whole - few).abs().max()) <= 8 * step
    backquant.save(made[513], tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(x), few)


BY_HAND = {
    "qconfig_mapping.set_module_name": lambda _, n: [
        converted(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            torch.randn(2, 4),
            backquant.default_mapping("x86").set_module_name("0", None),
            get_backend_config("x86"),
        )
    ],
}
