"""The README's commands, one after the other, on a model and data of the reader's."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import backquant
from backquant.cli.app import app

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    backquant (.*?)(?: +#.*)?$", README, re.MULTILINE)
MODEL = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(7200, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).flatten(1))


def net():
    torch.manual_seed(0)
    return Net().eval()
"""
#: What is added so that a command is short.
SHORTER = {"conform": ["--minutes", "0.5", "--rounds", "1", "--jobs", "0"]}


def test_each_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(COMMANDS) >= 10
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("mymodels.py").write_text(MODEL, encoding="utf-8")
    images = np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype("float32")
    np.savez("scans.npz", images)
    described = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    exec(compile(described, "README.md", "exec"), {})
    try:
        for command in COMMANDS:
            words = shlex.split(command)
            ran = CliRunner().invoke(app, [*words, *SHORTER.get(words[0], [])])
            assert ran.exit_code == (words[0] == "diff"), f"{command}\n{ran.output}"  # they differ
    finally:
        sys.modules.pop("mymodels", None)
    assert Path("net.onnx").exists() and Path("accuracy.html").exists()
    assert backquant.load("net.bq").report is not None
