"""On models that both captures take, the export gives what the symbolic trace gives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.match import Plan


def _decisions(plan: Plan) -> dict[str, Any]:
    return {
        name: replace(decision, rule=None, reasons=()) for name, decision in plan.decisions.items()
    }


@pytest.mark.parametrize("backend", ["x86", "fbgemm", "qnnpack"])
def test_plan_kernels_and_outputs(
    cnn: nn.Module, backend: str, make_images: Callable[..., list[torch.Tensor]]
) -> None:
    batches = make_images()
    traced, exported = (
        backquant.quantize(cnn, batches[0], backend=backend, calibration=batches, capture=how)
        for how in ("trace", "export")
    )
    assert _decisions(exported.plan) == _decisions(traced.plan)
    assert exported.plan.matches == traced.plan.matches
    assert exported.plan.fusions == traced.plan.fusions
    assert [row.observers for row in exported.report.rows] == [
        row.observers for row in traced.report.rows
    ]
    assert exported.kernels == traced.kernels
    other = make_images(1, batch=5)[0]
    assert torch.equal(exported(other), traced(other))
    assert exported.report.notes[0] == "captured by torch.export"


def _nodes(module: torch.fx.GraphModule) -> list[tuple[str, str, Any, list[str]]]:
    """Names, targets and inputs; settings may be spelled in other ways."""
    return [
        (node.op, node.name, node.target, [source.name for source in node.all_input_nodes])
        for node in module.graph.nodes
    ]


def test_original_tensors_and_names(cnn: nn.Module) -> None:
    from backquant.graph import capture
    from backquant.graph.export import capture_export
    from backquant.operators.aten import AtenSpeller

    traced = capture(cnn)
    exported = capture_export(cnn, torch.randn(2, 3, 8, 8), AtenSpeller())
    for name, parameter in exported.module.named_parameters():
        assert parameter is cnn.get_parameter(name)
    called = {node.name for node in traced.module.graph.nodes if node.op.startswith("call")}
    for name in called:
        assert exported.scopes[name] == traced.scopes[name]
    assert _nodes(exported.module) == _nodes(traced.module)


def test_rules_by_name_and_type(cnn: nn.Module) -> None:
    mapping = backquant.get_default_qconfig_mapping("x86")
    mapping.set_module_name("head", None).set_module_name("out", None)
    mapping.set_object_type(torch.nn.functional.linear, None)
    x = torch.randn(2, 3, 8, 8)
    reports = [
        backquant.explain(cnn, x, qconfig_mapping=mapping, capture=how)
        for how in ("trace", "export")
    ]
    assert [row.outcome for row in reports[0].rows] == [row.outcome for row in reports[1].rows]
    assert "float" in [row.outcome for row in reports[1].rows]


def test_a_rule_for_another_spelling_holds() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.add(x, x) * 2

    mapping = backquant.get_default_qconfig_mapping("x86").set_object_type(torch.add, None)
    asked = backquant.get_default_qconfig("x86")
    mapping.set_module_name_object_type_order("", operator.mul, 0, asked)
    for how in ("trace", "export"):
        report = backquant.explain(Add(), torch.ones(2), qconfig_mapping=mapping, capture=how)
        assert [row.outcome for row in report.rows] == ["float", "quantized"], how
