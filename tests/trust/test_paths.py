"""Names of files that stand in other files lead nowhere else."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from backquant.cli.data import load_data
from backquant.errors import ArtifactError, UsageError
from backquant.mapped import WeightFiles


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "ABSOLUTE", "a/../../secret.safetensors"]
)
def test_an_index_names_files_beside_it(name: str, tmp_path: Path) -> None:
    place = tmp_path / "model"
    place.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    outside = str(tmp_path / "secret.safetensors") if name == "ABSOLUTE" else name
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": outside}}), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"secret\.safetensors does not hold"):
        WeightFiles.of(index)
    save_file({"w": torch.zeros(2)}, place / "secret.safetensors")
    assert WeightFiles.of(index).files["w"].parent == place


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"weight_map": ' * 5_000, '{"weight_map": [1]}', "\ud800", "NaN"]
)
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ArtifactError, match="is no index"):
        WeightFiles.of(index)


@pytest.mark.parametrize("name", ["../out", "/out", "x\x1b[2J"])
def test_members_of_an_archive_are_names_and_no_files(name: str, tmp_path: Path) -> None:
    place = tmp_path / "data" / "x.npz"
    place.parent.mkdir()
    np.savez(tmp_path / "plain.npz", x=np.zeros((2, 3), np.float32))
    with zipfile.ZipFile(tmp_path / "plain.npz") as plain, zipfile.ZipFile(place, "w") as hostile:
        hostile.writestr(f"{name}.npy", plain.read("x.npy"))
        hostile.writestr("second.npy", plain.read("x.npy"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="takes no argument") as refused:
        list(load_data(str(place), nn.Linear(3, 3), 1))
    assert "\x1b" not in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_objects_in_an_archive_are_not_made(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(tmp_path / "ran"), "w")

    np.savez(tmp_path / "x.npz", x=np.array([Runs()], dtype=object))
    with pytest.raises(UsageError, match="cannot be read"):
        load_data(str(tmp_path / "x.npz"), nn.Linear(3, 3), 1)
    assert not (tmp_path / "ran").exists()
