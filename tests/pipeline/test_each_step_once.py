"""No flow enters a step twice: counted by the calls of its function."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant

SOURCE = Path(backquant.__file__).parent
STEPS = {
    ("graph/capture.py", "capture"),
    ("graph/export/capture.py", "capture_export"),
    ("graph/costs.py", "costs_and_outputs"),
    ("match/decide.py", "make_plan"),
    ("match/fusion.py", "plan_fusion"),
    ("match/scale_rules.py", "recheck"),
    ("prepare/insert.py", "insert_observers"),
    ("calibrate/measure.py", "measure"),
    ("convert/reference.py", "convert_to_reference"),
    ("lower/lowering.py", "lower"),
}
FILES = {str(SOURCE / file): file for file, _ in STEPS}
X = torch.ones(2, 3, 8, 8)
PLANNED = dict.fromkeys(["plan_fusion", "make_plan", "costs_and_outputs", "insert_observers"], 1)
# "recheck" is for what a plan leaves to the scales: nothing on x86
CONVERTED = dict.fromkeys(["convert_to_reference", "lower"], 1)


def steps_of(flow: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    counted: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        file = FILES.get(frame.f_code.co_filename) if event == "call" else None
        if (file, frame.f_code.co_name) in STEPS:
            counted[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        result = flow()
    finally:
        sys.setprofile(None)
    return result, counted


@pytest.fixture
def model() -> nn.Module:
    conv = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*conv, nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 2)).eval()


def test_quantize(model: nn.Module) -> None:
    made, steps = steps_of(lambda: backquant.quantize(model, X, backend="x86", calibration=[X]))
    assert steps == {"capture": 1, **PLANNED, "measure": 1, **CONVERTED}
    _, steps = steps_of(lambda: made.report.coverage)
    assert steps == {}


def test_explain(model: nn.Module) -> None:
    assert steps_of(lambda: backquant.explain(model, X))[1] == {"capture": 1, **PLANNED}


@pytest.mark.parametrize(
    ("name", "capture"), [("prepare_fx", "capture"), ("prepare_export", "capture_export")]
)
def test_prepare_and_convert(model: nn.Module, name: str, capture: str) -> None:
    mapping = backquant.default_mapping("x86")
    prepare, convert = getattr(backquant, name), backquant.convert_fx
    prepared, steps = steps_of(lambda: prepare(model, mapping, (X,), backend_config="x86"))
    assert steps == {capture: 1, **PLANNED}
    prepared(X)
    converted, steps = steps_of(lambda: convert(prepared, backend_config="x86"))
    assert steps == {"make_plan": 1, **CONVERTED}  # the plan for what conversion is asked for
    assert steps_of(lambda: converted.report.coverage)[1] == {}


def test_prepare_for_training(model: nn.Module) -> None:
    """Captured in both modes: a warning says what the model does otherwise in the other one."""
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flow = lambda: backquant.prepare_qat_fx(model.train(), mapping, (X,), backend_config="x86")  # noqa: E731
        assert steps_of(flow)[1] == {"capture": 2, **PLANNED}


class Counting(nn.Module):
    """Counts its calls on tensors, in a list that copies of the module share."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.seen: Any = Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.note(x)
        return self.fc(x)


class Seen:
    def __init__(self) -> None:
        self.count = 0

    def __copy__(self) -> Seen:
        return self  # as it says how it is copied, it is no state of the model

    def note(self, x: object) -> None:
        self.count += type(x) is torch.Tensor


@pytest.mark.parametrize(
    ("flow", "calls"),
    [
        # and once for the report: the SQNR of the outputs
        (lambda model, x: backquant.quantize(model, x, calibration=[x], slower="keep"), 3),
        (backquant.explain, 2),
        (lambda model, x: backquant.prepare_fx(model, backquant.default_mapping("x86"), x), 2),
    ],
    ids=["quantize", "explain", "prepare_fx"],
)
def test_how_often_the_model_itself_is_called(flow: Callable[..., Any], calls: int) -> None:
    """To see that the inputs fit, what it costs, and whether the graph gives the same; and once more, to see
    whether a call depends on what the last one left outside of the model."""
    model = Counting().eval()
    flow(model, torch.ones(2, 4))
    assert model.seen.count == calls
