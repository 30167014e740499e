"""The example of docs/capture.md: a model whose ``forward`` nobody can move, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.api.parts.test_quantize import Chosen, data
from tests.docs.test_pages import example

import backquant


def test_the_parts_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = example("docs/capture.md", 1)
    assert "quantize_parts" in code
    images = data(1)[0]
    given: dict[str, Any] = {
        "backquant": backquant,
        "detector": Chosen().eval(),
        "batches": data(),
        "images": images,
    }
    exec(compile(code, "docs/capture.md", "exec"), given)
    assert type(given["found"].model) is Chosen
    assert all(isinstance(row, torch.Tensor) for row in given["found"](images))
