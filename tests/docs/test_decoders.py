"""The example of docs/decoders.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - before transformers, which imports torchvision
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "decoders.md").read_text(encoding="utf-8")


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/decoders.md", "exec"), names)
    assert names["tokens"].shape == (1, 13)
    assert (tmp_path / "decoder.bq").is_file()
