from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - makes torchvision importable
import pytest
import torch
from torchvision.models.mobilenetv3 import mobilenet_v3_small

import backquant
from backquant.artifact import manifest
from backquant.artifact.file import read_text
from backquant.artifact.manifest import check_manifest, json_schema
from backquant.errors import ArtifactError
from backquant.runtime import QuantizedModel


@pytest.fixture
def stored(quantized: QuantizedModel, tmp_path: Path) -> dict[str, Any]:
    backquant.save(quantized, tmp_path / "model.bq")
    document: dict[str, Any] = json.loads(read_text(tmp_path / "model.bq").manifest)
    return document


def test_the_schema_is_the_published_one() -> None:
    published = Path(manifest.__file__).with_name("schema_v2.json").read_text(encoding="utf-8")
    assert json.loads(published) == json_schema()


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_manifests_of_stock_models_pass(capture: str, tmp_path: Path) -> None:
    images = torch.randn(2, 3, 32, 32)
    model = backquant.quantize(
        mobilenet_v3_small().eval(), images, backend="x86", calibration=[images], capture=capture
    )
    backquant.save(model, tmp_path / "model.bq")
    document = check_manifest(read_text(tmp_path / "model.bq").manifest)
    assert (
        len(document["plan"]["decisions"]) > 50 and document["interface"] is None
    ) or capture == "export"


def graph(document: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = document["model"]["graph"]
    return rows


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a field of another type": lambda d: d["report"].update(float_bytes="many"),
    "a field that is unknown": lambda d: d.update(later={}),
    "a field that is missing": lambda d: d.pop("model"),
    "a number beyond its range": lambda d: d.update(inputs=[[0, 0.0, 0, 0, 255, "uint8"]]),
    "an integer that is too long": lambda d: graph(d)[1].update(args=[1 << 70]),
    "a value of two kinds": lambda d: graph(d)[1].update(args=[{"node": "x", "tensor": "t0"}]),
    "a dtype that is none": lambda d: d["tensors"]["t0"].update(dtype="load"),
    "a tensor that is not there": lambda d: d["model"].update(buffers={"b": {"tensor": "t99"}}),
    "a node that comes later": lambda d: graph(d)[1].update(args=[{"node": "output"}]),
    "two nodes of one name": lambda d: graph(d)[1].update(name="x"),
    "a module that is not there": lambda d: d["model"]["children"].update(fc={"same_as": "later"}),
    "no output": lambda d: graph(d).pop(),
    "an output in the middle": lambda d: graph(d)[1].update(op="output"),
    "an engine that is none": lambda d: d["engine"].update(name=""),
}


@pytest.mark.parametrize("damage", WRONG)
def test_what_is_wrong_is_named(
    damage: str, stored: dict[str, Any], snapshot: Callable[..., None]
) -> None:
    WRONG[damage](stored)
    with pytest.raises(ArtifactError) as caught:
        check_manifest(json.dumps(stored))
    snapshot(f"manifest-{damage.replace(' ', '-')}", caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", '"\\udcff"', "[" * 100_000, "{}" * 9])
def test_what_is_no_document_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(ArtifactError):
        check_manifest(text)


def test_manifests_end_somewhere(
    monkeypatch: pytest.MonkeyPatch, snapshot: Callable[..., None]
) -> None:
    with pytest.raises(ArtifactError) as caught:
        check_manifest("[" * ((1 << 21) + 1))
    with pytest.raises(ArtifactError, match="8,388,608 values"):
        check_manifest("[" + "0," * ((1 << 23) + 1))
    snapshot("manifest-too-long", caught.value)
