from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig, get_backend_config
from backquant.errors import EngineError
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
    rounding: half_up
  values:
    input_dtype: {{dtype: qint8, symmetric: true, power_of_two_scale: {power}}}
    output_dtype: {{dtype: qint8, symmetric: true, power_of_two_scale: {power}}}
    requantization: {requantization}
    rounding: half_up
entries:
- operators: [conv2d, linear]
  dtype_configs: [int8]
- operators: [add, relu, flatten]
  dtype_configs: [values]
"""


def described(folder: Path, requantization: str, bias: str = "int32") -> BackendConfig:
    path = folder / f"{requantization}.yaml"
    power = str(requantization == "shift").lower()
    path.write_text(NPU.format(requantization=requantization, power=power, bias=bias))
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


def test_what_is_quantized_at_each_call_is_refused(snapshot: Callable[..., None]) -> None:
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    x = torch.randn(2, 4)
    prepared = backquant.prepare_fx(
        nn.Sequential(nn.Linear(4, 4)).eval(), mapping, x, backend_config=get_backend_config("x86")
    )
    with pytest.raises(EngineError) as caught:
        backquant.convert_to_integer_reference(prepared)
    snapshot("no_integer_reference", str(caught.value))


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
