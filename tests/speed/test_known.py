"""What is known to be slower on runtimes that are not timed here stays float, with both figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig, get_backend_config, list_backends
from backquant.operators.index import named
from backquant.reason_codes import ReasonCode


class Read(nn.Module):
    """A recurrent layer with a layer behind it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.lstm(x)[0])


def depthwise(taps: int) -> nn.Module:
    last = nn.Conv2d(16, 8, 1)
    return nn.Sequential(nn.Conv2d(16, 16, taps, groups=16), nn.ReLU(), last).eval()


def kinds(model: backquant.QuantizedModel) -> dict[str, str]:
    return {row.operator: row.outcome for row in model.report.rows}


SEQUENCE, IMAGE = torch.randn(2, 7, 12), torch.randn(2, 16, 12, 12)


@pytest.mark.parametrize(("hidden", "outcome"), [(16, "float"), (64, "quantized")])
def test_small_recurrent_layers_on_onnxruntime(hidden: int, outcome: str) -> None:
    made = backquant.quantize(Read(hidden).eval(), backend="onnxruntime", calibration=[SEQUENCE])
    found = kinds(made)
    assert (found["LSTM"], found["Linear"]) == (outcome, "quantized")


@pytest.mark.parametrize(("taps", "outcome"), [(7, "float"), (5, "quantized")])
def test_large_depthwise_windows_on_xnnpack(taps: int, outcome: str) -> None:
    made = backquant.quantize(depthwise(taps), backend="xnnpack", calibration=[IMAGE])
    [first] = [row for row in made.report.rows if row.node == "_0"]
    assert first.outcome == outcome
    if outcome == "float":
        [reason] = first.reasons
        assert reason.rule == ReasonCode.SLOWER_THAN_FLOAT
        assert "2440.0 µs" in reason.asked
        assert "380.0 µs" in reason.admitted


def test_kept_on_request() -> None:
    made = backquant.quantize(depthwise(7), backend="xnnpack", calibration=[IMAGE], slower="keep")
    assert made.report.coverage == 1.0


def test_what_is_required_stays() -> None:
    made = backquant.quantize(depthwise(7), backend="xnnpack", calibration=[IMAGE], require=1.0)
    assert made.report.coverage == 1.0
    assert "known to be slower" in "\n".join(made.plan.notes)


def test_where_nothing_else_is_left_the_model_is_float() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(12, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    model = Alone().eval()
    made = backquant.quantize(model, backend="onnxruntime", calibration=[SEQUENCE])
    assert made.report.coverage == 0.0
    assert "the model is returned, unchanged" in "\n".join(made.plan.notes)
    with torch.no_grad():
        assert torch.equal(made(SEQUENCE), model(SEQUENCE))


def test_records_name_what_there_is() -> None:
    knowing = [config for name in list_backends() if (config := get_backend_config(name)).slower]
    assert [config.name for config in knowing] == ["onnxruntime", "xnnpack"]
    for config in knowing:
        assert config.engine is None  # else it is timed
        for record in config.slower:
            assert [named(name).name for name in record.operators] == list(record.operators)


def test_descriptions_that_extend_a_runtime_know_what_it_knows(tmp_path: Path) -> None:
    path = tmp_path / "board.yaml"
    path.write_text("schema_version: 1\nname: board\nextends: xnnpack\n", encoding="utf-8")
    made = backquant.quantize(depthwise(7), backend=path, calibration=[IMAGE])
    [first] = [row for row in made.report.rows if row.node == "_0"]
    assert first.outcome == "float"
    assert first.reasons[0].place == "board: slower[0], not measured here"


def test_renamed_in_python() -> None:
    renamed = get_backend_config("onnxruntime").set_name("mine")
    made = backquant.quantize(Read(16).eval(), backend=renamed, calibration=[SEQUENCE])
    assert kinds(made)["LSTM"] == "float"


def test_an_extending_file_may_know_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "board.yaml"
    text = "schema_version: 1\nname: board\nextends: xnnpack\nslower: []\n"
    path.write_text(text, encoding="utf-8")
    assert BackendConfig.load(path).slower == ()
    made = backquant.quantize(depthwise(7), backend=path, calibration=[IMAGE])
    assert made.report.coverage == 1.0
