"""Folders: what is wrong with one is said before anything is written; what was broken off goes on."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import backquant
from backquant.api.checkpoints import checkpoint_target
from backquant.deploy.checkpoints import write
from backquant.errors import (
    ArtifactError,
    CoverageError,
    ExportError,
    MissingExtraError,
    UsageError,
)
from tiny_decoders import folder_of, make


def quantized(source: Path, place: Path, **options: Any) -> Any:
    asked = {"to": "compressed-tensors", "weights": "int4:32", **options}
    return backquant.quantize_checkpoint(source, place, **asked)


def change_config(folder: Path, **values: Any) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, **values}))


def drop_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def lie(folder: Path) -> None:
    [index] = folder.glob("*.index.json")
    data = json.loads(index.read_text())
    data["weight_map"]["model.norm.weight"] = sorted(set(data["weight_map"].values()))[0]
    data["weight_map"]["lm_head.weight"] = sorted(set(data["weight_map"].values()))[1]
    index.write_text(json.dumps(data))


def truncate(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])


def no_number(folder: Path) -> None:
    file = next(f for f in folder.glob("*.safetensors") if "lm_head.weight" in load_file(f))
    tensors = load_file(file)
    name = next(n for n, t in tensors.items() if t.dim() == 2 and "proj" in n)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, file)


BAD = {
    "no folder": (shutil.rmtree, {}, UsageError),
    "no config": (lambda f: (f / "config.json").unlink(), {}, UsageError),
    "a config of nothing": (lambda f: (f / "config.json").write_text("{}"), {}, ArtifactError),
    "another architecture": (
        lambda f: change_config(f, architectures=["ResNet"], model_type="resnet"), {}, UsageError
    ),
    "more layers": (lambda f: change_config(f, num_hidden_layers=3), {}, ArtifactError),
    "another width": (lambda f: change_config(f, intermediate_size=96), {}, ArtifactError),
    "quantized": (
        lambda f: change_config(f, quantization_config={"quant_method": "awq"}), {}, UsageError
    ),
    "a shard missing": (drop_shard, {}, ArtifactError),
    "an index that lies": (lie, {}, ArtifactError),
    "a truncated shard": (truncate, {}, ArtifactError),
    "groups that do not divide": (
        lambda f: None, {"weights": "int4:128", "ignore": ("*down*", "lm_head")}, CoverageError
    ),
    "groups of no kernel": (lambda f: None, {"weights": "int4:16"}, CoverageError),
    "no such format": (lambda f: None, {"to": "onnx"}, UsageError),
    "activations": (lambda f: None, {"activations": "int4"}, UsageError),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path, snapshot: Any) -> None:
    break_it, options, error = BAD[case]
    source = folder_of("llama", tmp_path, shard="100KB")
    break_it(source)
    before = set(tmp_path.iterdir())
    with pytest.raises(error) as raised:
        quantized(source, tmp_path / "out", **options)
    text = str(raised.value).replace(str(source), "SOURCE")
    snapshot(case.replace(" ", "-"), text)
    assert set(tmp_path.iterdir()) == before


def test_values_that_are_no_numbers(tmp_path: Path, snapshot: Any) -> None:
    source = folder_of("llama", tmp_path)
    no_number(source)
    with pytest.raises(ArtifactError, match="holds values that are no numbers") as raised:
        quantized(source, tmp_path / "out")
    snapshot("no-numbers", str(raised.value).replace(str(source), "SOURCE"))
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_taken(tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    place.mkdir()
    (place / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        quantized(source, place)
    with pytest.raises(UsageError, match="there is no folder"):
        quantized(source, tmp_path / "none" / "out")
    quantized(source, place, overwrite=True)
    assert not (place / "mine.txt").exists() and (place / "config.json").exists()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of("llama", tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ExportError, match=r"needs 0\.00 GB, and the disk has 0\.00"):
        quantized(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, place = folder_of("llama", tmp_path, shard="100KB"), tmp_path / "out"
    whole = tmp_path / "whole"
    quantized(source, whole)
    written: list[str] = []
    stream = write.write_stream

    def fails_third(path: Path, *rest: Any) -> None:
        if len(written) == 2:
            raise OSError(28, "No space left on device", str(path))
        written.append(path.name)
        stream(path, *rest)

    monkeypatch.setattr(write, "write_stream", fails_third)
    with pytest.raises(ExportError, match="No space left"):
        quantized(source, place)
    assert not place.exists()

    def counts(path: Path, *rest: Any) -> None:
        written.append(path.name)
        stream(path, *rest)

    monkeypatch.setattr(write, "write_stream", counts)
    quantized(source, place)
    assert len(written) == len(set(written)) == len(list(place.glob("*.safetensors"))) > 3
    for file in whole.iterdir():
        assert (place / file.name).read_bytes() == file.read_bytes()
    assert not list(tmp_path.glob(".out*"))


def test_another_request_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, place = folder_of("llama", tmp_path, shard="100KB"), tmp_path / "out"
    monkeypatch.setattr(write, "_finish", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(ExportError):
        quantized(source, place)
    monkeypatch.undo()
    quantized(source, place, weights="int8")
    assert {str(s) for s in backquant.load_checkpoint(place).schemes.values()} == {"int8 by row"}


def test_export_of_a_model_in_memory(tmp_path: Path, snapshot: Any) -> None:
    """Integers, and what quantizing has changed beside them."""
    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    model = make("llama")
    ids = torch.randint(3, 128, (1, 9))
    quantized_model = backquant.quantize(
        model, {"input_ids": ids, "use_cache": False}, backend="compressed_tensors",
        weights={"": "int4:32", "lm_head": None},
    )  # fmt: skip
    with pytest.raises(UsageError) as raised:
        backquant.export(quantized_model, place, to="compressed-tensors")
    snapshot("without-a-source", str(raised.value))
    exported = backquant.export(
        quantized_model, place, to="compressed-tensors", options={"source": source}
    )
    assert exported.integer == 14
    checkpoint = backquant.load_checkpoint(place)
    modules = dict(quantized_model.graph_module.named_modules())
    for path in checkpoint.schemes:
        layer = checkpoint.layer(path)
        assert torch.equal(layer.values, modules[path].weight)
        assert torch.equal(layer.scale, modules[path].weight_scale)
    other = tmp_path / "files"
    quantized(source, other)
    for file in place.glob("*.safetensors"):
        assert file.read_bytes() == (other / file.name).read_bytes()


def test_a_model_that_is_not_the_folders(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    other = backquant.quantize(
        model, torch.ones(1, 64), backend="compressed_tensors", weights="int8"
    )
    with pytest.raises(ExportError, match="has no place for quantized layers: 0"):
        backquant.export(
            other, tmp_path / "out", to="compressed-tensors",
            options={"source": folder_of("llama", tmp_path)},
        )  # fmt: skip


def test_formats_and_packages(
    tmp_path: Path, snapshot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of("llama", tmp_path)
    with pytest.raises(UsageError) as format_:
        checkpoint_target("onnx", tmp_path / "out")
    snapshot("no-format-of-checkpoints", str(format_.value))
    quantized(source, tmp_path / "int4")
    with pytest.raises(ExportError) as lost:
        backquant.export(backquant.load_checkpoint(tmp_path / "int4"), tmp_path / "out", to="awq")
    snapshot("layers-that-a-format-has-not", str(lost.value))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError) as missing:
        quantized(source, tmp_path / "out")
    snapshot("without-transformers", str(missing.value).replace(str(source), "SOURCE"))
    assert not (tmp_path / "out").exists()


def test_wrong_questions(tmp_path: Path, snapshot: Any) -> None:
    float_folder, served = folder_of("llama", tmp_path), tmp_path / "out"
    other, narrow = folder_of("gemma", tmp_path), folder_of("llama", tmp_path)
    quantized(float_folder, served)
    ids, quiet = torch.ones(1, 9, dtype=torch.int64), backquant.QConfigMapping()
    [file] = narrow.glob("*.safetensors")
    turned = {n: t.T.contiguous() if "down" in n else t for n, t in load_file(file).items()}
    save_file(turned, file)
    [file] = other.glob("*.safetensors")
    save_file({"lm_head.weight": torch.ones(4, 4)}, file)
    wrong: dict[str, Callable[[], Any]] = {
        "inputs": lambda: backquant.explain(float_folder, ids, backend="torchao"),
        "capture": lambda: backquant.explain(float_folder, backend="torchao", capture="trace"),
        "not-of-files": lambda: backquant.explain(float_folder, backend="x86"),
        "a-request": lambda: backquant.explain(served, backend="torchao", qconfig_mapping=quiet),
        "data": lambda: backquant.compare(float_folder, served, [ids]),
        "quantized-twice": lambda: backquant.compare(served, served),
        "no-layer": lambda: backquant.compare(other, served),
        "another-shape": lambda: backquant.compare(narrow, served),
    }
    for name, call in wrong.items():
        with pytest.raises(UsageError) as raised:
            call()
        snapshot(name, raised.value)


def test_a_comparison_without_data(snapshot: Any) -> None:
    model, batches = nn.Sequential(nn.Linear(4, 4)), [torch.ones(2, 4)]
    made = backquant.quantize(model, calibration=batches)
    with pytest.raises(UsageError) as raised:
        backquant.compare(model, made)  # type: ignore[call-overload]
    snapshot("comparison-without-data", raised.value)
