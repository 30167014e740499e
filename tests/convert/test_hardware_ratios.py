"""Relations between scales that the description demands are made, and judged where they cannot be."""

from __future__ import annotations

from pathlib import Path

import benchmarks.stock  # noqa: F401 - torchvision's operators
import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.backend_config import BackendConfig
from backquant.convert import reference_state

SPEC = """
schema_version: 1
name: chip
dtype_configs:
  weights: {input_dtype: qint8, output_dtype: qint8, weight_dtype: {dtype: qint8, symmetric: true,
            granularity: per_channel}, RELATION}
  values: {input_dtype: qint8, output_dtype: qint8}
entries:
- {operators: [conv2d, conv2d+batch_norm2d, conv2d+batch_norm2d+relu, linear], dtype_configs: [weights]}
- {operators: [add, relu, max_pool2d, adaptive_avg_pool2d, flatten], dtype_configs: [values]}
"""
POWER = "requantization_ratio: power_of_two, requantization: shift, rounding: half_up"


def backend(folder: Path, relation: str) -> BackendConfig:
    (folder / "chip.yaml").write_text(SPEC.replace("RELATION", relation))
    return BackendConfig.load(folder / "chip.yaml")


def ratios(quantized) -> list[torch.Tensor]:
    """Input × weight / output scale of each channel of each weighted module."""
    found = []
    for row in quantized.report.operators:
        scales = {seen.role: seen.scale for seen in row.observers}
        if "weight" in scales:
            layer = quantized.graph_module.get_submodule(row.module_path)
            layer = layer[0] if isinstance(layer, nn.Sequential) else layer
            found.append(layer.weight_scale.double() * scales["input"] / scales["output"])
    return found


@pytest.mark.parametrize("relation", [POWER, "requantization_ratio: [2**-10, 2**-8]"])
def test_resnet18(relation: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    x = torch.randn(2, 3, 32, 32)
    made = backquant.quantize(model, x, backend=backend(tmp_path, relation), calibration=[x])
    assert {row.outcome for row in made.report.operators} == {"quantized"}
    found = torch.cat(ratios(made))
    assert len(found) > 4000
    if relation is POWER:
        assert (found.log2() - found.log2().round()).abs().max() < 1e-6
    else:
        assert found.min() > 2**-10 * (1 - 1e-6) and found.max() < 2**-8 * (1 + 1e-6)
    with torch.no_grad():
        error = (made(x) - model(x)).square().mean() / model(x).square().mean()
    assert error < 10**-2.0


class Twice(nn.Module):
    """One layer at two places; the second reads far smaller values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x) * 0.013)


class ByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def test_weights_of_functions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    made = backquant.quantize(ByFunction(), x, backend=backend(tmp_path, POWER), calibration=[x])
    by_role = {site.role.value: site for site in made.record.sites.sites}
    qparams = made.record.qparams
    scales = {role: qparams[site.name].scale.double() for role, site in by_role.items()}
    exponents = (scales["input"] * scales["weight"] / scales["output"]).log2()
    assert (exponents - exponents.round()).abs().max() < 1e-6


def test_a_layer_at_two_places_keeps_one_ratio(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(4, 8)
    config = backend(tmp_path, POWER)
    mapping = backquant.get_default_qconfig_mapping(config)
    prepared = backquant.prepare_fx(model, mapping, x, backend_config=config)
    prepared(x)
    state = reference_state(backquant.convert_to_reference_fx(prepared, dialect="decomposed"))
    one, two = state.plan.decisions["layer"], state.plan.decisions["layer_1"]
    assert one.quantized and not two.quantized
    assert two.reasons[0].rule == "requantization-ratio"
