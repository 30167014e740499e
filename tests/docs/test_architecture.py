"""The node of docs/architecture.md goes the way that the page says."""

from __future__ import annotations

import re
from pathlib import Path

import benchmarks.stock  # noqa: F401 - the page imports torchvision
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_node(capsys: pytest.CaptureFixture[str]) -> None:
    [code, printed] = re.findall(r"```(?:python|text)\n(.*?)```", PAGE, re.DOTALL)[1:]
    exec(compile(code, "docs/architecture.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == printed
