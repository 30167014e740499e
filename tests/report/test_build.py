"""The report of real models says what their plans, sites, qparams and kernels say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import backquant
from backquant.match import Plan
from backquant.prepare import Record
from backquant.report.build import ReportSource, build_report
from backquant.report.model import Report, Row
from backquant.report.rows import ReportedGraph, measured_row


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.side = nn.Conv2d(3, 8, 1)
        self.pool = nn.MaxPool2d(2)
        self.norm = nn.GroupNorm(2, 4)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.stem(x), torch.sigmoid(self.side(x))], 1)
        return self.norm(self.fc(self.pool(y).mean([2, 3]).view(x.size(0), -1)))


@pytest.fixture(scope="module")
def quantized() -> backquant.runtime.QuantizedModel:  # type: ignore[name-defined]
    torch.manual_seed(0)
    return backquant.quantize(Net(), calibration=[torch.randn(4, 3, 8, 8)])


@pytest.fixture
def report(quantized: nn.Module) -> Report:
    return quantized.report  # type: ignore[return-value]


@pytest.fixture
def row(report: Report) -> Callable[[str], Row]:
    by_node = {row.node: row for row in report.rows}
    return lambda node: by_node[node]


def test_a_row_per_operator_in_graph_order(report: Report) -> None:
    assert [r.node for r in report.rows] == [
        "stem_0", "side", "sigmoid", "cat", "pool", "mean", "size", "view", "fc", "norm",
    ]  # fmt: skip
    assert report.model == "Net" and report.backend == "x86" and report.engine.startswith("x86 (")


def test_fused_modules_name_their_parts(row: Callable[[str], Row]) -> None:
    assert row("stem_0").fused == ("stem.0", "stem.1", "stem.2")
    assert row("side").fused == ()


def test_observers_have_what_was_measured(quantized: nn.Module, row: Callable[[str], Row]) -> None:
    source, weight, output = row("side").observers
    assert (source.role, source.value, source.dtype) == ("input", "x", "quint8")
    assert (weight.role, weight.dtype, weight.quant_min) == ("weight", "qint8", -128)
    assert weight.detail.startswith("8 scales on axis 0 (")
    assert output.role == "output" and output.scale is not None and output.zero_point is not None
    graph = quantized.graph_module.graph  # type: ignore[union-attr]
    first = next(n for n in graph.nodes if n.op == "call_function")
    assert first.args[1:3] == (source.scale, source.zero_point)


def test_weights_inside_of_fused_modules(row: Callable[[str], Row]) -> None:
    [weight] = [observer for observer in row("stem_0").observers if observer.role == "weight"]
    assert weight.detail.startswith("8 scales on axis 0 (")


def test_fixed_qparams(row: Callable[[str], Row]) -> None:
    output = row("sigmoid").output
    assert output is not None and (output.scale, output.zero_point) == (1 / 256, 0)
    assert row("sigmoid").rule.startswith("object_type")


def test_sharing_is_said_on_every_side(row: Callable[[str], Row]) -> None:
    cat, pool = row("cat").output, row("pool").output
    assert cat is not None and pool is not None
    assert "pool" in cat.shared_with and "cat" in pool.shared_with
    assert cat.scale == pool.scale
    for node in ("cat", "pool"):
        output = row(node).output
        assert output is not None and output.value not in output.shared_with


def test_costs_and_bytes(report: Report, row: Callable[[str], Row]) -> None:
    images, pixels = 4, 64
    assert row("side").multiply_adds == images * pixels * 3 * 8
    assert row("stem_0").multiply_adds == images * pixels * 3 * 8 * 9
    assert row("sigmoid").multiply_adds == 0
    assert report.float_bytes == sum(4 * p.numel() for p in Net().parameters()) + 2 * 8 * 4 + 8
    assert 0 < report.quantized_bytes < report.float_bytes


def test_kernels_and_why_there_is_none(report: Report, row: Callable[[str], Row]) -> None:
    assert row("stem_0").kernel.startswith("onednn.qconv")
    assert row("fc").kernel.startswith("onednn.qlinear")
    assert row("norm").outcome == "float" and row("norm").reasons[0].rule == "no-entry"
    assert set(report.kernels) == {r.kernel for r in report.rows if r.kernel}
    floats = {r.node for r in report.rows if r.outcome == "float"}
    assert not floats & {reason.node for reason in report.unlowered}


def test_not_tensors_are_no_operators(report: Report, row: Callable[[str], Row]) -> None:
    assert row("size").outcome == "not_tensor" and row("size") not in report.operators


def test_entries_that_the_model_does_not_reach(report: Report) -> None:
    assert "Conv2d" not in report.unreached_entries and "Conv3d" in report.unreached_entries


def test_before_and_after_calibration_the_same_rows() -> None:
    explained = backquant.explain(Net(), torch.randn(4, 3, 8, 8))
    assert explained.engine == "engine x86"
    cat = next(row for row in explained.rows if row.node == "cat").output
    assert cat is not None and cat.scale is None and "pool" in cat.shared_with
    assert cat.short.startswith("= ")


def test_what_is_not_known_is_left_out() -> None:
    record = Record(Plan(""), backquant.BackendConfig(), backquant.QConfigMapping())
    source = ReportSource(record, ReportedGraph())
    assert build_report(source).backend == "unnamed backend"
    assert measured_row(None).qparams == ""
