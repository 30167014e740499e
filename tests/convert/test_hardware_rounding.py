"""``rounding`` and ``requantization`` in the reference model: equal to integers that are computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.convert import reference_state
from backquant.dtypes import Requantization, Rounding, requantize_sums
from backquant.errors import ConfigError

SPEC = """
schema_version: 1
name: npu
dtype_configs:
  int8:
    input_dtype: {dtype: qint8, power_of_two_scale: POWER}
    output_dtype: {dtype: qint8, power_of_two_scale: POWER}
    weight_dtype: {dtype: qint8, symmetric: true, power_of_two_scale: POWER, granularity: per_channel}
    bias_dtype: int32
    bias_scale: input_times_weight
    rounding: ROUNDING
    requantization: ARITHMETIC
  added: {input_dtype: qint8, output_dtype: qint8, rounding: half_up}
entries:
- {operators: [conv2d, linear], dtype_configs: [int8]}
- {operators: [add], dtype_configs: [added]}
"""
CASES = [
    ("float", "half_up"),
    ("float", "half_even"),
    ("fixed_point", "half_away"),
    ("fixed_point", "half_up"),
    ("fixed_point_twice", "half_away"),
    ("shift", "half_up"),
]


def described(tmp_path, arithmetic: str, rounding: str) -> str:
    path = tmp_path / "npu.yaml"
    text = SPEC.replace("ROUNDING", rounding).replace("ARITHMETIC", arithmetic)
    path.write_text(text.replace("POWER", str(arithmetic == "shift").lower()))
    return str(path)


def observed(model: nn.Module, x: torch.Tensor, path: str):
    backend = backquant.BackendConfig.load(path)
    mapping = backquant.get_default_qconfig_mapping(backend)
    prepared = backquant.prepare_fx(model, mapping, x, backend_config=backend)
    prepared(x)
    return prepared


@pytest.mark.parametrize(("arithmetic", "rounding"), CASES)
def test_the_reference_model_computes_so(arithmetic: str, rounding: str, tmp_path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), torch.randn(4, 3, 12, 12)
    prepared = observed(model, x, described(tmp_path, arithmetic, rounding))
    made = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    state = reference_state(made)
    given, wanted = (state.qparams[site.name].number for site in state.sites.sites)
    conv = made.get_submodule("0")
    steps = given.scale * conv.weight_scale.double()
    values = torch.round(x / given.scale + given.zero_point).clamp(-128, 127) - given.zero_point
    sums = nn.functional.conv2d(values.double(), conv.weight.double())
    sums += torch.round(conv.bias.detach().double() / steps).reshape(-1, 1, 1)
    real = (steps / wanted.scale).reshape(-1, 1, 1)
    way = Requantization(arithmetic), Rounding(rounding)
    integers = requantize_sums(sums.long(), real, *way) + wanted.zero_point
    expected = (integers.clamp(-128, 127) - wanted.zero_point) * wanted.scale
    assert torch.equal(made(x), expected.float())


def test_ties_go_where_the_description_says_and_files_keep_it(tmp_path) -> None:
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    values = torch.tensor([[2.55, -0.005, 0.005, 0.015, -0.015]])
    made = backquant.quantize(
        Sum(),
        (values, values * 0),
        backend=described(tmp_path, "float", "half_up"),
        calibration=[(values, values * 0)],
    )
    assert "backquant.quantize_rounded" in made.code
    backquant.save(made, tmp_path / "m.bq")
    again = backquant.load(tmp_path / "m.bq")
    assert torch.equal(again(values, values * 0), made(values, values * 0))


def test_quantized_tensors_cannot_round_so(tmp_path, snapshot) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 2, 1)).eval(), torch.randn(1, 3, 4, 4)
    prepared = observed(model, x, described(tmp_path, "fixed_point", "half_up"))
    with pytest.raises(ConfigError) as caught:
        backquant.convert_to_reference_fx(prepared, dialect="quantized_tensor")
    snapshot("rounding_of_quantized_tensors", str(caught.value))


def test_onnx_has_no_such_rounding(tmp_path, snapshot) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 2, 1)).eval(), torch.randn(1, 3, 4, 4)
    prepared = observed(model, x, described(tmp_path, "fixed_point", "half_up"))
    made = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    with pytest.raises(backquant.ExportError) as caught:
        backquant.export(made, tmp_path / "m.onnx", example_inputs=x, require=0.0)
    snapshot("rounding_in_onnx", str(caught.value))


BY_HAND = {
    "the targets qdq-onnx": lambda _, n: backquant.export(
        n["made"], n["tmp_path"] / "m.onnx", to="qdq-onnx", example_inputs=n["x"], require=0.0
    ),
}
