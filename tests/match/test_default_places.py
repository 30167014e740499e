"""``quantize`` leaves residual additions in float; the default mapping, as PyTorch's, does not."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn

import backquant


class Layers(nn.Module):
    """Pre-norm residual layers without attention, with a convolution's skip connection in front."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x) + x).transpose(1, 2)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def _outcomes(report: Any) -> list[str]:
    return [row.outcome for row in report.rows if row.operator == "operator.add"]


def test_residual_additions_stay_float() -> None:
    model = Layers().eval()
    for layer in model.layers:
        nn.init.normal_(layer.weight, std=2.0)
    batches = [torch.randn(2, 8, 5) for _ in range(4)]
    quantized = backquant.quantize(model, calibration=batches)
    assert _outcomes(quantized.report) == ["float"] * 4
    for row in quantized.report.rows:
        if row.operator == "operator.add":
            assert row.reasons[0].rule == "float-neighbours"
            assert row.reasons[0].place == "x86, defaults.leave_float[3]"
    qconfig = backquant.get_default_qconfig("x86")
    mapping = backquant.get_default_qconfig_mapping("x86").set_module_name_regex("", qconfig)
    asked = backquant.quantize(model, calibration=batches, qconfig_mapping=mapping)
    assert _outcomes(asked.report) == ["quantized"] * 4
    with torch.no_grad():
        wanted = model(batches[0])
    errors = [(q(batches[0]) - wanted).pow(2).sum() for q in (quantized, asked)]
    assert errors[0] < errors[1]


def test_a_mapping_that_names_no_place_keeps_the_rules() -> None:
    """Such as the default mapping that PyTorch's users pass."""
    model, batch = Layers().eval(), torch.randn(2, 8, 5)
    qconfig = backquant.get_default_qconfig("x86")
    mappings = (
        backquant.get_default_qconfig_mapping("x86"),
        backquant.default_mapping("x86"),
        backquant.QConfigMapping().set_global(qconfig),
    )
    for mapping in mappings:
        report = backquant.explain(model, batch, qconfig_mapping=mapping)
        assert _outcomes(report) == ["float"] * 4
    for mapping in mappings:
        mapping.set_module_name_object_type_order("", operator.add, 1, qconfig)
        report = backquant.explain(model, batch, qconfig_mapping=mapping)
        assert _outcomes(report) == ["float", "quantized", "float", "float"]
        mapping.set_object_type(operator.add, backquant.get_default_qconfig("qnnpack"))
        report = backquant.explain(model, batch, qconfig_mapping=mapping)
        assert _outcomes(report) == [
            "float",
            "quantized",
            "quantized",
            "quantized",
        ]  # first: of torch.relu


def test_a_backend_without_the_rule() -> None:
    config = backquant.get_backend_config("x86")
    assert config.defaults is not None
    from dataclasses import replace

    config.set_defaults(replace(config.defaults, leave_float=()))
    report = backquant.explain(Layers().eval(), torch.randn(2, 8, 5), backend=config)
    assert _outcomes(report) == ["quantized"] * 4


SPELLED: dict[str, Any] = {
    "divided": lambda own, a: torch.softmax(a / 4, -1),
    "div": lambda own, a: a.div(4).softmax(-1),
    "masked": lambda own, a: (a * 0.25).masked_fill(own.mask, -1e9).softmax(-1),
    "where": lambda own, a: torch.where(own.mask, a, torch.tensor(-1e9)).softmax(-1),
    "module": lambda own, a: own.softmax(a * 0.25),
    "bias first": lambda own, a: own.softmax(own.bias + a),
    "method": lambda own, a: own.softmax(a.add(own.bias).mul(0.25)),
    "less the largest": lambda own, a: torch.softmax(a - a.amax(-1, keepdim=True), -1),
}


class Attending(nn.Module):
    def __init__(self, spelled: str) -> None:
        super().__init__()
        self.spelled, self.softmax = spelled, nn.Softmax(dim=-1)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("mask", torch.rand(8, 8) > 0.7)
        self.register_buffer("bias", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = SPELLED[self.spelled](self, torch.matmul(q, k.transpose(-2, -1)))
        return self.out(torch.matmul(scores, v).transpose(1, 2).reshape(2, 8, 32))


@pytest.mark.parametrize("spelled", SPELLED)
def test_attention_stays_float_however_its_scores_are_spelled(spelled: str) -> None:
    """And is one kernel between integers."""
    torch.manual_seed(0)
    model, x = Attending(spelled).eval(), torch.randn(2, 8, 32)
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    found = {row.node: row.outcome for row in quantized.report.rows}
    assert {found["matmul"], found["matmul_1"], found["softmax"]} == {"float"}
    targets = [str(node.target) for node in quantized.graph_module.graph.nodes]
    whole = spelled not in ("where", "less the largest")  # what the one kernel knows
    assert any("attended" in target for target in targets) == whole
    assert sum("quantized." in use.kernel for use in quantized.kernels) == 0
