"""Files and models that do not fit each other: an error that names what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from backquant.errors import ArtifactError, BackquantError, UsageError
from backquant.mapped import EmptyOnMeta, MappedMemory, WeightFiles, filled


class Tied(nn.Module):
    """Two names of one weight, and a table that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4)
        self.head.weight = self.words.weight
        self.register_buffer("places", torch.arange(4.0), persistent=False)


WEIGHTS = {"words.weight": torch.ones(4, 2), "head.bias": torch.zeros(4)}


def made(
    folder: Path, *shards: dict[str, torch.Tensor], model: Any = Tied, ignore: Any = ()
) -> Any:
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"part-{number}.safetensors")
    with EmptyOnMeta():
        empty = model()
    with MappedMemory(folder) as memory:
        files = WeightFiles.of(folder)
        return filled(empty, dict(files.tensors(memory)), files.place, ignore)


@pytest.mark.parametrize("twice", [False, True])
def test_tied_weights_under_one_name_or_two(twice: bool, tmp_path: Path) -> None:
    more = {"head.weight": torch.ones(4, 2)} if twice else {}
    model = made(
        tmp_path, {"words.weight": torch.ones(4, 2)}, {"head.bias": torch.zeros(4), **more}
    )
    assert model.head.weight is model.words.weight
    assert model.head.weight.sum() == 8 and model.places.tolist() == [0, 1, 2, 3]


WRONG: dict[str, list[dict[str, torch.Tensor]]] = {
    "missing": [{"words.weight": torch.ones(4, 2)}],
    "shape": [{**WEIGHTS, "head.bias": torch.zeros(3)}],
    "dtype": [{**WEIGHTS, "head.bias": torch.zeros(4, dtype=torch.bfloat16)}],
    "unexpected": [{**WEIGHTS, "head.bais": torch.zeros(4)}],
    "tied": [{**WEIGHTS, "head.weight": torch.zeros(4, 2)}],
    "twice": [WEIGHTS, {"head.bias": torch.zeros(4)}],
    "none": [],
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit(kind: str, tmp_path: Path, snapshot: Callable[..., None]) -> None:
    with pytest.raises(BackquantError) as caught:
        made(tmp_path, *WRONG[kind])
    snapshot(kind, caught.value)


def test_ignored_names_and_buffers_without_values(
    tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    shard = {**WEIGHTS, "head.bais": torch.zeros(4)}
    assert made(tmp_path, shard, ignore=["head.b*s"]).head.bias.sum() == 0
    with torch.device("meta"):
        bare = Tied()
    with pytest.raises(UsageError) as caught:
        made(tmp_path, WEIGHTS, model=lambda: bare)
    snapshot("buffer", caught.value)


def test_an_index_that_does_not_say_what_is_there(
    tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file(WEIGHTS, tmp_path / "a.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "a.safetensors")}))
    save_file(WEIGHTS, tmp_path / "other.safetensors")  # of no concern
    assert made(tmp_path).head.bias.sum() == 0
    for name, text in {
        "lacks": json.dumps({"weight_map": {"words.weight": "b.safetensors"}}),
        "index": "[]",
    }.items():
        index.write_text(text)
        with pytest.raises(ArtifactError) as caught:
            WeightFiles.of(index)
        snapshot(name, caught.value)
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    with pytest.raises(ArtifactError) as caught:
        WeightFiles.of(tmp_path / "cut.safetensors")
    snapshot("cut", caught.value)
