"""The example of docs/deploy.md runs and prints what the page says; the table of rules is complete."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from backquant.backend_config import QDQRules
from backquant.deploy import list_targets

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/deploy.md", "exec"), names)
    [printed] = re.findall(r"```text\n(model\.onnx.*?)```", PAGE, re.DOTALL)
    version = re.compile(r"onnxruntime [\d.]+|\n  accuracy lost on this CPU: .*")  # of the machine
    assert version.sub("", capsys.readouterr().out) == version.sub("", printed)


def test_the_tables() -> None:
    rules = {field.name for field in fields(QDQRules)}
    assert rules <= set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    targets = set(re.findall(r"^\| `([\w-]+)` \| `\.", PAGE, re.MULTILINE))
    assert targets == {"onnx", "openvino", "tensorrt", "executorch", "inductor", "qdq-onnx", "pt2e"}
    assert targets <= set(list_targets())
