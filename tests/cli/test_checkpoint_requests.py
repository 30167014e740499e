"""Commands on folders: what is wrong with the request is said in the options' own names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backquant
from tiny_decoders import folder_of

FIX_NAMES = {"batches.npz": "images.npz", "FLOAT_FOLDER": "float", "QUANTIZED": "served"}
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


LOOKS = {
    "inputs-of-a-folder": ("explain", "float", "--backend", "gguf", "--inputs", "1,9:int64"),
    "table-of-a-folder": ("explain", "float", "--backend", "gguf", "--table"),
    "data-of-folders": ("compare", "float", "served", "--data", "images.npz"),
    "metric-of-folders": ("compare", "float", "served", "--metric", "zoo:loss"),
    "quantized-twice": ("compare", "served", "served"),
    "comparison-without-data": ("compare", "zoo:PAIR", "out.bq"),
}


@pytest.mark.parametrize("case", LOOKS)
def test_wrong_looks(case: str, run: Callable[..., Any], tmp_path: Path, snapshot: Any) -> None:
    folder_of("llama", tmp_path).rename("float")
    backquant.quantize_checkpoint("float", "served", to="compressed-tensors", weights="int4:32")
    assert run("quantize", "zoo:PAIR", "--data", "images.npz", "-o", "out.bq").status == 0
    result = run(*LOOKS[case])
    assert result.status == 2
    snapshot(case, result.err)
