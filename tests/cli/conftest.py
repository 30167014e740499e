from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import backquant
import following

MODELS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act, self.fc = nn.Conv2d(3, 8, 3), nn.Softplus(), nn.Linear(8, 4)
    def forward(self, x):
        return self.fc(self.act(self.conv(x)).mean([2, 3]))

class Scaled(Net):
    def forward(self, x, scale):
        return super().forward(x) * scale

torch.manual_seed(0)
INSTANCE = Net()
PAIR = (Net(), torch.randn(1, 3, 8, 8))

def make():
    return Net()

def with_inputs():
    return Net(), (torch.randn(1, 3, 8, 8),)

def with_keywords():
    return Net(), {"x": torch.randn(1, 3, 8, 8)}

def needs(argument):
    return Net()

def raises():
    return {}["no such weights"]

def number():
    return 3

def branches():
    class Branching(nn.Module):
        def forward(self, x):
            return -x if x.sum() > 0 else x
    return Branching()

def soft():
    return nn.Sequential(nn.Softplus())

def doubled():
    return Net().double()

BATCHES = [torch.randn(2, 3, 8, 8) for _ in range(3)]

def loader():
    return DataLoader(TensorDataset(torch.randn(6, 3, 8, 8)), batch_size=4)

def generator():
    yield from BATCHES

def labelled():
    return DataLoader(TensorDataset(torch.randn(6, 3, 8, 8), torch.zeros(6)), batch_size=4)

def nothing():
    return None
"""


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Standard output, which must be one JSON document."""
        return json.loads(self.out)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a module ``zoo`` of models and data, and ``images.npz``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "zoo.py").write_text(MODELS)
    images = np.random.default_rng(0).normal(size=(10, 3, 8, 8)).astype("float32")
    np.savez(tmp_path / "images.npz", x=images)
    return tmp_path


@pytest.fixture
def run(here: Path) -> Callable[..., Result]:
    """Run a command in this process; an exception that is no exit status is a failure."""

    def command(*arguments: str) -> Result:
        from backquant.cli.app import app

        following.commands[:] = [(command, arguments)]
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(result.exit_code, result.stdout, result.stderr)

    return command


@pytest.fixture
def spawn(here: Path) -> Callable[..., Result]:
    """Run ``python -m backquant`` as a process of its own."""

    def command(*arguments: str, **environment: str) -> Result:
        source = str(Path(backquant.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-m", "backquant", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": source, **environment},
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return command
