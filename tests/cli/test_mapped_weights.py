"""``quantize --files``: weights that stay in their files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import backquant
from backquant.cli.mapped_weights import check_one_process
from backquant.errors import UsageError

Run = Callable[..., Any]


def test_weights_in_files(run: Run, here: Path, snapshot: Callable[..., None]) -> None:
    sys.path.insert(0, str(here))
    save_file(importlib.import_module("zoo").make().state_dict(), here / "w.safetensors")
    words = ("quantize", "zoo:make", "--data", "images.npz", "--files", "w.safetensors")
    result = run(*words, "-o", "out.bq")
    assert result.status == 0 and "wrote out.bq" in result.out
    assert backquant.load(here / "out.bq").report.coverage > 0
    again = run(*words, "-o", "more.bq", "--json")
    assert again.data["artifact_bytes"] == (here / "more.bq").stat().st_size
    refused = run(*words, "-f", "-o", "out.bq", "--recipe", "better")
    assert refused.status == 2
    snapshot("recipe", refused.err)
    with pytest.raises(UsageError) as caught:
        check_one_process(object())
    snapshot("ranks", caught.value)
