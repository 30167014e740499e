"""``backquant quantize FOLDER``: from a Hugging Face folder to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

import backquant
from backquant.api.folders import CheckpointAnswer
from backquant.cli.app import app
from tiny_decoders import folder_of


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def test_rounded_to_nearest(tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    code, text = run(
        "quantize",
        source,
        "--weights",
        "int4:32",
        "--to",
        "compressed-tensors",
        "-o",
        place,
        "--json",
    )
    assert code == 0, text
    assert len(json.loads(text)["schemes"]) == 14
    code, text = run(
        "quantize", source, "--weights", "int8", "--to", "compressed-tensors", "-o", place, "-f"
    )
    assert code == 0 and "14 layers int8 by row" in text
    assert len(backquant.load_checkpoint(place).schemes) == 14


def test_on_data(tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    ids = torch.randint(3, 128, (8, 16)).numpy()
    np.savez(tmp_path / "tokens.npz", input_ids=ids)
    words = ("--weights", "int4:32", "--to", "compressed-tensors", "--batch-size", 4)
    (tmp_path / "gptq.yaml").write_text("name: gptq\nsteps: [gptq]\nbiases: false\n")
    code, text = run(
        "quantize", source, *words, "-o", place, "--data", tmp_path / "tokens.npz",
        "--recipe", tmp_path / "gptq.yaml",
    )  # fmt: skip
    assert code == 0, text
    nearest = tmp_path / "nearest"
    backquant.quantize_checkpoint(source, nearest, to="compressed-tensors", weights="int4:32")
    one, two = backquant.load_checkpoint(place), backquant.load_checkpoint(nearest)
    assert one.schemes.keys() == two.schemes.keys()
    assert any(not torch.equal(one.layer(p).values, two.layer(p).values) for p in one.schemes)


def test_activations_with_scales_that_are_known_ahead(tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    np.savez(tmp_path / "tokens.npz", input_ids=torch.randint(3, 128, (4, 16)).numpy())
    words = ("--weights", "int8", "--to", "compressed-tensors", "--activations", "int8:ahead")
    code, text = run("quantize", source, *words, "-o", place)
    assert code == 2 and "measured on data" in text
    code, text = run("quantize", source, *words, "-o", place, "--data", tmp_path / "tokens.npz")
    assert code == 0, text
    checkpoint = backquant.load_checkpoint(place)
    assert all(checkpoint.layer(path).activation.scale > 0 for path in checkpoint.schemes)
    code, text = run("quantize", "torch.nn:Identity", "-o", place, "--activations", "int8")
    assert code == 2 and "--activations" in text


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    source = folder_of("llama", tmp_path)
    code, text = run("quantize", source, "-o", tmp_path / "out")
    assert code == 2 and "--weights int4:128 --to compressed-tensors" in text
    words = ("quantize", source, "-o", tmp_path / "out", "--weights", "int4:32", "--to", "gptq")
    code, text = run(*words, "--recipe", "better")
    assert code == 2 and "needs data" in text
    code, text = run(*words, "--backend", "x86")
    assert code == 2 and "--backend has no effect on a folder" in text


def test_a_folder_is_explained_and_compared(tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    backquant.quantize_checkpoint(source, place, to="compressed-tensors", weights="int4:64")
    code, text = run("explain", source, "--backend", "gguf", "--json")
    told = json.loads(text)
    assert code == 1 and told["whole"] == ""
    assert len(told["taken"]) == 2 and len(told["refused"]) == 13  # 64 inputs are no group of 128
    code, text = run("explain", place, "--backend", "awq")
    assert code == 1 and "awq takes 0 of 14 layers" in text and "requested weight int4" in text
    code, text = run("explain", place, "--backend", "mlx", "--json")
    assert code == 0 and len(json.loads(text)["taken"]) == 14, text
    code, text = run("compare", source, place, "--json")
    rows = json.loads(text)["rows"]
    assert code == 0 and len(rows) == 14 and 10 < rows[0]["sqnr"] <= rows[-1]["sqnr"] < 30


def test_the_answer_is_on_standard_output(spawn: Callable[..., Any], tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    backquant.quantize_checkpoint(source, place, to="compressed-tensors", weights="int4:32")
    for words in (("compare", source, place), ("explain", place, "--backend", "mlx")):
        done = spawn(*map(str, words))
        assert done.status == 0 and str(place) in done.out, done.err


def test_a_gguf_file_is_explained_and_compared(tmp_path: Path) -> None:
    source, file = folder_of("llama", tmp_path), tmp_path / "model.gguf"
    backquant.quantize_checkpoint(source, file, to="gguf", weights="int8:32")
    answer = backquant.explain(file, backend="mlx")
    assert isinstance(answer, CheckpointAnswer) and answer.is_taken and not answer.refused
    found = backquant.compare(source, file)
    assert min(row.sqnr for row in found.rows) > 35 and "at worst" in str(found)


def test_an_architecture_that_gguf_has_not(tmp_path: Path) -> None:
    source = folder_of("llama", tmp_path)
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["OPTForCausalLM"]
    (source / "config.json").write_text(json.dumps(config))
    answer = backquant.explain(source, backend="gguf")
    assert isinstance(answer, CheckpointAnswer) and not answer.is_taken
    assert "OPTForCausalLM is not written as GGUF" in str(answer)
