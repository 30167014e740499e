"""``backquant export`` and ``quantize --to``. The texts of usage errors are in ``messages``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backquant.cli.app import app
from backquant.cli.export_command import beside, parse_dynamic, parse_options
from backquant.errors import UsageError

MODELS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return model, torch.randn(2, 3, 8, 8)

def data():
    return [torch.randn(4, 3, 8, 8)]
"""


CUSTOM = """
@torch.library.custom_op("backquant_cli_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

twice.register_fake(torch.empty_like)

class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return torch.ops.backquant_cli_tests.twice(self.fc(x))

def custom():
    return Custom()

class Batches(list):
    def __iter__(self):
        yield torch.randn(2, 3, 8, 8)
        raise AssertionError("no calibration before the target is asked")

def batches():
    return Batches()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "exported_models.py").write_text(MODELS + CUSTOM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


QUANTIZE = ["quantize", "exported_models:make", "-d", "exported_models:data", "-b", "onnxruntime"]


def test_quantize_save_export(folder: Path) -> None:
    runner = CliRunner()
    made = runner.invoke(app, [*QUANTIZE, "-o", "m.bq", "--to", "onnx", "--json"])
    assert made.exit_code == 0, made.output
    exported = json.loads(made.stdout)["exported"]
    assert exported["integer"] == exported["expected"] == 3
    assert (folder / "m.onnx").exists()
    again = runner.invoke(
        app, ["export", "m.bq", "--to", "onnx", "-o", "n.onnx", "--dynamic", "input:0=batch"]
    )
    assert again.exit_code == 0, again.output
    assert "3 of 3 quantized operators on integer kernels" in again.stdout
    assert "QLinearConv (int8)" in again.stdout
    refused = runner.invoke(app, ["export", "m.bq", "--to", "onnx"])
    assert refused.exit_code == 2
    assert "m.onnx exists" in refused.stderr and "--force" in refused.stderr


@pytest.mark.parametrize("target", ["onnx", "openvino", "tensorrt", "executorch"])
def test_what_a_target_cannot_take_is_said_before_calibration(folder: Path, target: str) -> None:
    backend = {"onnx": "onnxruntime", "executorch": "xnnpack"}.get(target, target)
    data = ["-d", "exported_models:batches", "-o", "m.bq", "--to", target]
    command = ["quantize", "exported_models:custom", *data]
    result = CliRunner().invoke(app, [*command, "-b", backend])
    assert result.exit_code == 2, result.output
    assert "cannot take one operator of the model" in result.stderr
    assert "twice (backquant_cli_tests.twice.default)" in result.stderr
    result = CliRunner().invoke(app, [*command, "-b", "x86"])
    assert result.exit_code == 2
    assert f"--backend {backend}" in result.stderr
    assert not list(folder.glob("m.*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "none.bq"], "neither a target nor a file is named"),
        (["export", "none.bq", "--to", "onnxx"], "there is no target 'onnxx'"),
        (["export", "none.bq", "--to", "onnx"], "none.bq does not exist"),
        (["export", "none.bq", "--to", "onnx", "--dynamic", "x"], "'x' names no axis"),
        ([*QUANTIZE, "-o", "m.bq", "--to", "onxx"], "there is no target 'onxx'"),
    ],
)
def test_bad_usage(folder: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(folder.glob("*.onnx"))
    assert not list(folder.glob("*.bq"))


def test_a_target_or_a_file_is_named(snapshot: Any) -> None:
    with pytest.raises(UsageError) as raised:
        beside(Path("model.bq"), None)
    snapshot("export-nowhere", raised.value)


@pytest.mark.parametrize("text", ["x", "x:first=batch", "0:0=batch", "x:0=a b"])
def test_a_dynamic_axis_has_a_name_and_a_number(text: str, snapshot: Any) -> None:
    with pytest.raises(UsageError) as raised:
        parse_dynamic([text])
    snapshot("export-axis", raised.value, {repr(text): "'<text>'"})


@pytest.mark.parametrize("text", ["opset", "=21", "opset=", "opset={"])
def test_an_option_has_a_name_and_a_value(text: str, snapshot: Any) -> None:
    with pytest.raises(UsageError) as raised:
        parse_options([text])
    snapshot("export-option", raised.value, {repr(text): "'<text>'"})


BY_HAND = {
    "--to onnx": lambda *_: beside(Path("model.bq"), "onnx"),
    "a name and a value": lambda *_: parse_options(["opset=21"]),
    "the argument's name": lambda *_: parse_dynamic(["x:0=batch"]),
}
