"""Parts in a folder, and back in the model that they were made of."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.api.parts.test_quantize import Block, Chosen, data, made
from tests.snapshots import compare as snapshot
from torch import nn

import backquant
from backquant.api import PartlyQuantized
from backquant.errors import BackquantError


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = Chosen().eval()
    found = made(model)
    backquant.save_parts(found, tmp_path / "parts")
    assert {file.name for file in tmp_path.iterdir()} == {"parts"}
    again = backquant.load_parts(model, tmp_path / "parts")
    assert list(again.parts) == list(found.parts) and again.coverage == found.coverage
    assert dict(again.in_float) == dict(found.in_float) and type(model.first) is Block
    x = data(1)[0]
    for one, two in zip(found(x), again(x), strict=True):
        assert torch.equal(one, two)
    alone = backquant.load(tmp_path / "parts" / "0.bq")
    assert alone(x).shape == x.shape


def test_nothing_is_left_where_saving_fails(tmp_path: Path) -> None:
    found = made(Chosen())
    found.parts["head"].record.plan.__dict__["backend"] = object()  # what no file can hold
    with pytest.raises(Exception):  # noqa: B017
        backquant.save_parts(found, tmp_path / "parts")
    assert not list(tmp_path.iterdir())


def test_messages(tmp_path: Path) -> None:
    found = made(Chosen())
    backquant.save_parts(found, tmp_path / "parts")

    def changed(name: str, **fields: Any) -> Path:
        folder = tmp_path / name
        backquant.save_parts(found, folder)
        index = folder / "parts.json"
        document = json.loads(index.read_text())
        document["parts"][0].update({k: v for k, v in fields.items() if k in ("path", "file")})
        document.update({k: v for k, v in fields.items() if k not in ("path", "file")})
        index.write_text(json.dumps(document))
        return folder

    def rows(change: Callable[[Any], list[Any]]) -> Path:
        folder = changed(str(len(list(tmp_path.iterdir()))))
        index = folder / "parts.json"
        document = json.loads(index.read_text())
        index.write_text(json.dumps(document | {"parts": change(document["parts"][0])}))
        return folder

    def written(content: str | bytes) -> Path:
        folder = changed(str(len(list(tmp_path.iterdir()))))
        data = content if isinstance(content, bytes) else content.encode()
        (folder / "parts.json").write_bytes(data)
        return folder

    refused = {
        "a-folder-that-exists": lambda: backquant.save_parts(found, tmp_path / "parts"),
        "no-place": lambda: backquant.save_parts(found, tmp_path / "none" / "parts"),
        "no-index": lambda: backquant.load_parts(Chosen(), tmp_path),
        "another-model": lambda: backquant.load_parts(
            nn.Sequential(nn.Linear(2, 2)), tmp_path / "parts"
        ),
        "the-model-itself": lambda: backquant.load_parts(Chosen(), changed("itself", path="")),
        "a-file-elsewhere": lambda: backquant.load_parts(
            Chosen(), changed("elsewhere", file="../secret.bq")
        ),
        "another-format": lambda: backquant.load_parts(Chosen(), changed("format", format=2)),
        "a-part-twice": lambda: backquant.load_parts(Chosen(), rows(lambda first: [first, first])),
        "a-part-within": lambda: backquant.load_parts(
            Chosen(), rows(lambda first: [first, first | {"path": f"{first['path']}.x"}])
        ),
        "too-many-multiply-adds": lambda: backquant.load_parts(Chosen(), changed("total", total=1)),
        "a-key-twice": lambda: backquant.load_parts(
            Chosen(), written('{"format": 1, "format": 1, "parts": []}')
        ),
        "nested": lambda: backquant.load_parts(Chosen(), written("[" * 100_000)),
        "no-text": lambda: backquant.load_parts(Chosen(), written(b"\xff\x00")),
        "a-file-that-is-gone": lambda: backquant.load_parts(
            Chosen(), changed("gone", file="99.bq")
        ),
    }
    for name, call in refused.items():
        with pytest.raises(BackquantError) as raised:
            call()
        snapshot(
            Path(__file__),
            name,
            re.sub(
                r"FOLDER/[0-9]+", "FOLDER/N", str(raised.value).replace(str(tmp_path), "FOLDER")
            ),
        )


def test_parts_that_multiply_nothing_are_printed() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sigmoid())
    found = PartlyQuantized(model, {}, {}, 0, {"0": "no kernel"})
    assert "outside of these parts: unknown" in str(found)


def _again(_: str, names: dict[str, Any]) -> None:
    """Parts of the same structure in a folder that was not there, read again."""
    folder = names["tmp_path"] / "again"
    shutil.rmtree(folder, ignore_errors=True)
    backquant.save_parts(names["found"], folder)
    backquant.load_parts(Chosen(), folder)


BY_HAND = {
    **dict.fromkeys(
        ["folder=", "name a folder", "backquant.save_parts", "load_parts(model", "check the path"],
        _again,
    ),
    "write the parts again": _again,
}
