from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig, get_backend_config
from backquant.errors import EngineError
from backquant.observe import BlockMinMaxObserver
from backquant.pipeline.weight_only import weight_only_mapping
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
    mapping = QConfigMapping().set_global(backquant.float16_dynamic_qconfig)
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
