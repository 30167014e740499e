"""docs/vendors.md: every snippet runs, and its conditions are ones that descriptions have."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import backquant
from backquant.cli.app import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vendors.md").read_text(encoding="utf-8")
PACKAGE = """
from torch import nn, randn

TABLE = {}

def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), randn(1, 3, 8, 8)
"""
HEAD = "schema_version: 1\nname: my_chip\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "mypkg.py").write_text(PACKAGE)
    np.savez(tmp_path / "batches.npz", np.random.default_rng(0).random((4, 3, 8, 8), np.float32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_snippets(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/vendors.md", "exec"), names)
    first, *exported = capsys.readouterr().out.splitlines()
    assert first == "[('ConvReLU2d', 'quantized'), ('Conv2d', 'float')]"
    where = "1 of 1 between quantize and dequantize nodes"
    assert exported == [f"qdq-onnx: {where}", f"pt2e: {where}"]


def test_the_description_and_the_commands(here: Path) -> None:
    parts = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    (here / "my_chip.yaml").write_text(HEAD + "\n".join(parts))
    runner = CliRunner()
    assert runner.invoke(app, ["check", "my_chip.yaml"]).exit_code == 0
    lines = [
        line
        for line in re.findall(r"^    backquant (.*)$", PAGE, re.MULTILINE)
        if "FILE" not in line
    ]
    assert len(lines) == 3
    for line in lines:
        done = runner.invoke(app, shlex.split(line))
        assert done.exit_code == 0, done.output
    assert {"model.bq", "model.onnx", "model.pt2"} <= {path.name for path in here.iterdir()}


def test_the_conditions(here: Path) -> None:
    rows = re.findall(r"^\| [^|]*? \| (`.*`) \|$", PAGE, re.MULTILINE)
    parts = [part for row in rows for part in re.findall(r"`([^`]+)`", row)]
    assert len(parts) > 12
    kinds = {"output.": "interpolate", "dim:": "mean"}
    for part in parts:
        name = next((kinds[start] for start in kinds if part.startswith(start)), "conv2d")
        entry = f"- {{operators: [{name}], dtype_configs: [a], where: {{{part}}}}}"
        configs = (
            "dtype_configs:\n  a: {input_dtype: qint8, output_dtype: qint8, weight_dtype: qint8}"
        )
        (here / "one.yaml").write_text(f"{HEAD}{configs}\nentries:\n{entry}\n")
        backquant.BackendConfig.load(here / "one.yaml")
