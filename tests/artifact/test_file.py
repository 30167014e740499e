from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import backquant
from backquant.artifact import file
from backquant.artifact.file import (
    manifest_text,
    packed,
    read_file,
    read_text,
    readable,
    write_file,
)
from backquant.artifact.manifest import LONGEST
from backquant.errors import ArtifactError, EngineError
from backquant.match.plan import Plan

SUM = hashlib.sha256(b"".join(struct.pack("<f", n) for n in range(1000))).hexdigest()
TENSORS = {"t0": torch.arange(1000.0)}
MANIFEST: dict[str, Any] = {
    "versions": {"backquant": "0.1.0", "torch": "2.13.0"},
    "engine": None,
    "kernels": [],
    "left_in_float": [],
    "inputs": [],
    "outputs": [],
    "example": None,
    "backend": {"name": "ü"},
    "plan": Plan("x86").to_dict(),
    "interface": None,
    "report": None,
    "model": {"training": False, "class": "torch.nn.modules.linear.Identity"},
    "strides": {},
}


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_document_and_its_tensors(tmp_path: Path) -> None:
    target = tmp_path / "model.bq"
    write_file(target, MANIFEST, TENSORS)
    document, tensors = read_file(target)
    entry = {"dtype": "float32", "shape": [1000], "sha256": SUM}
    assert document == {**MANIFEST, "tensors": {"t0": entry}}
    assert json.loads(read_text(target).manifest) == document
    assert torch.equal(tensors["t0"], TENSORS["t0"])
    assert only(tmp_path) == ["model.bq"]


def test_the_same_content_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_file(tmp_path / name, MANIFEST, {"t1": torch.ones(2), "t0": torch.zeros(3)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_permissions_are_those_of_new_files_or_of_the_old_one(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_file(tmp_path / "new", MANIFEST, TENSORS)
        (tmp_path / "old").touch()
        (tmp_path / "old").chmod(0o604)
        write_file(tmp_path / "old", MANIFEST, TENSORS)
    finally:
        os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o604


@pytest.mark.parametrize("before", [None, b"what was there"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, before: bytes | None, snapshot: Callable[..., None]
) -> None:
    target = tmp_path / "model.bq"
    if before is not None:
        target.write_bytes(before)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 1, 2000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(ArtifactError) as caught:
                write_file(target, MANIFEST, {"t0": torch.arange(1000.0)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert only(tmp_path) == ([] if before is None else ["model.bq"])
    snapshot("file-full-disk", caught.value)
    assert before is None or target.read_bytes() == before


def test_an_interruption_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(file.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "model.bq", MANIFEST, TENSORS)
    assert only(tmp_path) == []


def write_header(path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"t0": torch.ones(2)}, path, metadata=metadata)


def make(path: Path) -> dict[str, Path]:
    """Files that are no readable artifacts, by what is wrong with them."""
    files = {
        name: path / f"{name}.bq"
        for name in (
            "missing",
            "folder",
            "empty",
            "text",
            "foreign",
            "no-metadata",
            "newer",
            "older",
            "manifest-changed",
            "header-changed",
            "tensor-changed",
            "tensor-added",
            "no-version",
            "no-json",
            "no-object",
            "truncated-header",
            "truncated-data",
        )
    }
    files["folder"].mkdir()
    files["empty"].touch()
    files["text"].write_text("not a safetensors file, whatever its name says" * 10)
    write_header(files["foreign"], {"format": "pt"})
    write_header(files["no-metadata"], None)
    write_header(files["newer"], {"backquant": json.dumps({"format_version": 99})})
    write_header(files["no-version"], {"backquant": "{}"})
    write_header(files["no-json"], {"backquant": "{not json"})
    write_header(files["no-object"], {"backquant": "[1]"})
    write_header(files["older"], {"backquant": json.dumps({"format_version": 1})})
    manifest, other = manifest_text(MANIFEST, TENSORS), {"t0": TENSORS["t0"].int()}
    whole = packed(manifest, TENSORS)
    files["manifest-changed"].write_bytes(whole.replace(b"2.13.0", b"2.14.0"))
    files["tensor-changed"].write_bytes(whole[:-1] + b"\x01")
    files["header-changed"].write_bytes(packed(manifest, other))
    files["tensor-added"].write_bytes(packed(manifest, {**TENSORS, "t1": torch.ones(1)}))
    write_file(files["truncated-data"], MANIFEST, TENSORS)
    whole = files["truncated-data"].read_bytes()
    files["truncated-data"].write_bytes(whole[:-100])
    files["truncated-header"].write_bytes(whole[:20])
    return files


@pytest.mark.parametrize("read", [read_text, read_file])
def test_files_that_are_no_artifacts(
    tmp_path: Path, read: Callable[[Path], Any], snapshot: Callable[..., None]
) -> None:
    for name, path in make(tmp_path).items():
        if read is read_text and name in ("tensor-changed", "header-changed", "tensor-added"):
            continue  # no tensor is read
        with pytest.raises(ArtifactError) as caught:
            read(path)
        text = re.sub(r"(not a readable artifact): .*", r"\1: <reason>", str(caught.value))
        snapshot(f"file-{name}", text)  # the reason is safetensors'


def test_the_header_is_bounded_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Callable[..., None]
) -> None:
    """Of a file that names itself too long nothing is read; one that would be too long is not written."""
    path = tmp_path / "long.bq"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", LONGEST + 8))
        stream.truncate(8 + LONGEST + 8)  # no header, but zeros, which safetensors would refuse
    with pytest.raises(ArtifactError) as caught:
        read_file(path)
    snapshot("file-long-header", caught.value)
    path.unlink()
    monkeypatch.setattr(file, "LONGEST", 100)
    with pytest.raises(ArtifactError, match="at most 100 are read"):
        write_file(path, MANIFEST, TENSORS)
    assert only(tmp_path) == []


def test_folders_that_cannot_be_written_to(tmp_path: Path, snapshot: Callable[..., None]) -> None:
    with pytest.raises(ArtifactError) as caught:
        write_file(tmp_path / "deep" / "model.bq", MANIFEST, TENSORS)
    snapshot("file-no-folder", caught.value)
    with pytest.raises(ArtifactError) as caught:
        write_file(tmp_path, MANIFEST, TENSORS)
    snapshot("file-is-folder", caught.value)
    with pytest.raises(ArtifactError) as caught:
        write_file(Path(os.fsdecode(b"model-\xff.bq")), MANIFEST, TENSORS)
    snapshot("file-no-utf8", caught.value)
    assert only(tmp_path) == []


def test_errors_while_reading_name_the_file(snapshot: Callable[..., None]) -> None:
    with pytest.raises(ArtifactError) as caught, readable("model.bq"):
        raise ArtifactError("bad name", where="node x", fix="rename it")
    snapshot("file-where", caught.value)
    with pytest.raises(ArtifactError) as caught, readable("model.bq"):
        {}["rows"]
    snapshot("file-damaged", caught.value)
    with pytest.raises(EngineError), readable("model.bq"):
        raise EngineError("no such engine")
    with pytest.raises(ArtifactError), readable("model.bq"):
        raise RecursionError("nested too deeply")


def _written(folder: Path) -> None:
    """Into a folder that is there, under a name of UTF-8, by this version."""
    path = folder / "made" / "model.bq"
    path.parent.mkdir(exist_ok=True)
    write_file(path, MANIFEST, TENSORS)
    read_file(path)
    shutil.rmtree(path.parent)


def _compared(_: str, names: dict[str, Any]) -> None:
    model, batches = torch.nn.Linear(8, 4).eval(), [torch.randn(4, 8)]
    quantized = backquant.quantize(model, backend="onnxruntime", calibration=batches)
    path = names["tmp_path"] / names["name"]
    backquant.export(quantized, path, overwrite=True)
    assert backquant.compare(model, path, batches).outputs


BY_HAND = {
    "backquant.compare(model, path, batches)": _compared,
    **dict.fromkeys(
        ["check the path", "quantize the model again", "mkdir -p", "path=", "rename it"],
        lambda *_: _written(Path(tempfile.mkdtemp())),
    ),
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.pt", "is what torch.save wrote"),
        ("model.onnx", "is an ONNX file"),
        ("model.gguf", "is a GGUF checkpoint"),
    ],
)
def test_a_file_of_another_kind_is_said_to_be_that(
    name: str, words: str, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    (tmp_path / name).write_bytes(b"x" * 100)
    with pytest.raises(ArtifactError, match=words) as caught:
        backquant.load(tmp_path / name)
    if name == "model.onnx":
        snapshot("file-of-another-kind", caught.value)
