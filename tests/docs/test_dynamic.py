"""The example of docs/dynamic.md runs, and its table is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant

PAGE = (Path(__file__).parents[2] / "docs" / "dynamic.md").read_text(encoding="utf-8")


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/dynamic.md", "exec"), names)
    assert "weight only" in capsys.readouterr().out
    assert len(names["quantized"].kernels) == 3
    assert names["quantized"].kernels[-1].kernel in PAGE


def _rows() -> list[tuple[str, str]]:
    found = re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]+) \|$", PAGE, re.MULTILINE)
    assert len(found) == 5
    return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.fc(self.table(words))


@pytest.mark.parametrize(("name", "where"), _rows())
@pytest.mark.parametrize("engine", ["x86", "fbgemm", "qnnpack", "onednn"])
def test_the_table(name: str, where: str, engine: str) -> None:
    mapping = backquant.QConfigMapping().set_global(getattr(backquant.qconfig, name))
    words = torch.tensor([[1, 2]])
    if where == "all engines" or engine in where.split(", "):
        quantized = backquant.quantize(Model(), words, backend=engine, qconfig_mapping=mapping)
        assert len(quantized.kernels) == 1
    else:
        with pytest.raises(backquant.errors.CoverageError):
            backquant.quantize(Model(), words, backend=engine, qconfig_mapping=mapping)
