"""``backquant quantize FOLDER``: what is wrong with the request is said in the options' own names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = {
    "no-format": ("--weights", "int4:32"),
    "options-of-models": ("--to", "compressed-tensors", "--weights", "int4:32", "--backend", "x86"),
    "bits-of-a-folder": (
        "--to",
        "compressed-tensors",
        "--weights",
        "int4:32",
        "--weight-bits",
        "7",
    ),
    "requirement-of-a-folder": ("--to", "gguf", "--weights", "int4:32", "--require", "0.9"),
    "bits-of-weights": ("--weights", "int4", "--weight-bits", "7"),
    "bits-of-files": ("--weights", "int4", "--weight-bits", "7", "--files", "w.safetensors"),
    "activations-of-a-model": ("--activations", "int8"),
    "recipe-without-data": ("--to", "gguf", "--weights", "int4:32", "--recipe", "better"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_requests(
    case: str,
    run: Callable[..., Any],
    tmp_path: Path,
    snapshot: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    of_models = ("activations-of-a-model", "bits-of-weights", "bits-of-files")
    model = "torch.nn:Identity" if case in of_models else "folder"
    result = run("quantize", model, *CASES[case], "-o", "out")
    assert result.status == 2
    assert not Path("out").exists()
    snapshot(case, result.err)
