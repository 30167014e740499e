from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accuracy.conftest import Block, Case
from tests.snapshots import compare as snapshot
from torch import nn

import backquant
from backquant.accuracy.figures import ErrorSums
from backquant.errors import BackquantError, CalibrationError


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_errors_are_those_of_the_kernels(cases: dict[str, Case], capture: str) -> None:
    case = cases[capture]
    found = backquant.compare(case.model, case.quantized, case.data)
    sums = ErrorSums()
    with torch.no_grad():
        for batch in case.data:
            sums.add(case.model(batch), case.quantized(batch))
    assert found.sqnr == pytest.approx(sums.sqnr, abs=0.5)
    assert all(row.added > 20 for row in found.rows)
    last = next(row for row in found.rows if row.operators == ("norm",))
    assert last.added > 100 and last.accumulated == pytest.approx(found.sqnr, abs=0.01)
    by_kernel = {name for row in found.rows if row.kernel for name in row.operators}
    assert by_kernel == {name for use in case.quantized.kernels for name in use.nodes} - {"size"}


def test_clipping_and_unused_range_are_counted() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid()).eval()
    small, large = torch.rand(64, 4), 4 * torch.rand(64, 4)
    quantized = backquant.quantize(model, calibration=[small], slower="keep")
    first = backquant.compare(model, quantized, [large]).rows[0]
    assert first.rounds and first.clipped is not None and 0.6 < first.clipped < 0.9
    assert first.bounds == pytest.approx((0, 1), abs=0.1)
    narrow = backquant.compare(model, quantized, [small / 4]).rows[0]
    assert narrow.unused == pytest.approx(0.75, abs=0.05) and narrow.clipped == 0
    assert narrow.histogram is not None and sum(narrow.histogram.counts) == 256


def test_a_loaded_model_is_compared_as_well(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["export"]
    backquant.save(case.quantized, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    one = backquant.compare(case.model, case.quantized, case.data)
    two = backquant.compare(case.model, loaded, case.data)
    assert [row.node for row in one.rows] == [row.node for row in two.rows]
    assert two.sqnr == one.sqnr


def test_a_metric_is_measured_on_both_models(cases: dict[str, Case]) -> None:
    case = cases["trace"]
    metric = lambda model: float(model(case.data[0]).detach().abs().mean())  # noqa: E731
    found = backquant.compare(case.model, case.quantized, case.data, metric=metric)
    assert found.metric == (metric(case.model), metric(case.quantized))
    assert "  metric  " in str(found)


def refused(name: str, cases: dict[str, Case]) -> None:
    case = cases["trace"]
    if name == "no_model":
        backquant.compare(case.model, case.model, case.data)  # type: ignore[arg-type]
    elif name == "another_model":
        backquant.compare(torch.nn.Linear(3, 3), case.quantized, [torch.ones(1, 3)])
    elif name == "metric_raises":
        backquant.compare(case.model, case.quantized, case.data, metric=lambda _: 1 / 0)
    elif name == "metric_nan":
        backquant.compare(case.model, case.quantized, case.data, metric=lambda _: float("nan"))
    elif name == "no_batch":
        backquant.compare(case.model, case.quantized, [])
    elif name == "another_batch":
        backquant.compare(case.model, case.quantized, [{"y": case.data[0]}])


@pytest.mark.parametrize(
    "name",
    ["no_model", "another_model", "metric_raises", "metric_nan", "no_batch", "another_batch"],
)
def test_messages(cases: dict[str, Case], name: str) -> None:
    with pytest.raises(BackquantError) as error:
        refused(name, cases)
    words = re.sub(rf"{re.escape(__file__)}:\d+", "FILE:LINE", str(error.value))
    snapshot(Path(__file__), name, words)


def test_the_model_is_not_changed() -> None:
    model = Block().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(8, 3, 8, 8)
    quantized = backquant.quantize(model, calibration=[x], slower="keep")
    backquant.compare(model, quantized, [x], metric=lambda found: float(found(x).mean()))
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Masked(nn.Module):
    """A mask that is added in float, behind what is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layer(x) + mask, -1)


def test_infinite_values_are_refused_where_they_are_rounded_alone() -> None:
    torch.manual_seed(0)
    model, mask = Masked().eval(), torch.zeros(4, 8)
    mask[:, 6:] = -torch.inf
    data = [(torch.randn(4, 8), mask) for _ in range(4)]
    quantized = backquant.quantize(model, calibration=data, slower="keep")
    assert backquant.compare(model, quantized, data).sqnr > 20
    assert len(backquant.sensitivity(model, calibration=data, data=data).groups) == 1
    endless = torch.full((4, 8), torch.inf), mask
    with pytest.raises(CalibrationError, match="'x' of batch 1 holds 0 NaN and 32 infinite"):
        backquant.compare(model, quantized, [data[0], endless])
    with pytest.raises(CalibrationError, match="'x' of batch 1 holds 0 NaN and 32 infinite"):
        backquant.sensitivity(model, calibration=data, data=[data[0], endless])


def _compared(case: Case, data: list[Any], **more: Any) -> None:
    """What the fixes of ``refused`` come to."""
    assert backquant.compare(case.model, case.quantized, data, **more).sqnr > 10


BY_HAND = {
    "data=[batch]": lambda _, n: _compared(n["cases"]["trace"], n["cases"]["trace"].data[:1]),
    "batch = (x,)": lambda _, n: _compared(n["cases"]["trace"], [(n["cases"]["trace"].data[0],)]),
    "pass the float model": lambda _, n: _compared(n["cases"]["trace"], n["cases"]["trace"].data),
    "metric=": lambda _, n: _compared(
        n["cases"]["trace"], n["cases"]["trace"].data, metric=lambda model: 0.5
    ),
    "a metric that is finite": lambda _, n: _compared(
        n["cases"]["trace"], n["cases"]["trace"].data, metric=lambda model: 0.0
    ),
}
