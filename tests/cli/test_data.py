from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from backquant.cli.data import Batches, load_data
from backquant.errors import UsageError


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None, *, flag: bool = True
    ) -> torch.Tensor:
        return x * self.scale


class Many(nn.Module):
    def forward(self, x: torch.Tensor, **rest: torch.Tensor) -> torch.Tensor:
        return x


X = np.arange(10, dtype="float32").reshape(5, 2)


def test_each_kind_of_file_gives_the_same_batches(here: Path) -> None:
    np.savez("a.npz", x=X, y=X + 1)
    save_file({"x": torch.from_numpy(X), "y": torch.from_numpy(X + 1)}, "a.safetensors")
    (here / "folder").mkdir()
    np.save("folder/x.npy", X)
    np.save("folder/y.npy", X + 1)
    (here / "folder" / "README").write_text("not an array")
    torch.save({"x": torch.from_numpy(X), "y": torch.from_numpy(X + 1)}, "a.pt")
    for name in ("a.npz", "a.safetensors", "a.pt", "folder"):
        batches = load_data(name, Two(), 2)
        assert isinstance(batches, Batches) and len(batches) == 3 and batches.samples == 5
        for _ in range(2):  # it can be read again
            read = list(batches)
            assert [set(batch) for batch in read] == [{"x", "y"}] * 3
            assert torch.equal(torch.cat([batch["y"] for batch in read]), torch.from_numpy(X + 1))


def test_arrays_without_names_are_positional_in_order(here: Path) -> None:
    np.savez("a.npz", *[X + i for i in range(11)])
    [batch] = load_data("a.npz", Two(), 8)
    assert isinstance(batch, tuple) and [float(a[0, 0]) for a in batch] == list(range(11))


def test_a_single_array_may_call_itself_anything(here: Path) -> None:
    np.savez("a.npz", images=X)
    [batch] = load_data("a.npz", Two(), 8)
    assert isinstance(batch, tuple) and torch.equal(batch[0], torch.from_numpy(X))
    [named] = load_data("a.npz", Many(), 8)
    assert set(named) == {"images"}


def test_batches_that_torch_saved(here: Path) -> None:
    batches = [(torch.from_numpy(X), torch.from_numpy(X + 1)), (torch.from_numpy(X),)]
    torch.save(batches, "all.pt")
    (here / "folder").mkdir()
    for place, batch in enumerate(batches):
        torch.save(batch, f"folder/{place}.pt")
    for name in ("all.pt", "folder"):
        read = list(load_data(name, Two(), 2))
        assert [len(batch) for batch in read] == [2, 1]
        assert torch.equal(read[0][1], torch.from_numpy(X + 1))


def test_one_array_in_a_file(here: Path) -> None:
    np.save("images.npy", X)
    torch.save(torch.from_numpy(X), "images.pt")
    for name in ("images.npy", "images.pt"):
        assert [len(batch) for (batch,) in load_data(name, Two(), 2)] == [2, 2, 1]


def test_keyword_only_arguments(here: Path) -> None:
    np.savez("a.npz", x=X, flag=np.ones(5, bool))
    assert set(next(iter(load_data("a.npz", Two(), 8)))) == {"x", "flag"}


def test_float64_is_read_as_the_model_computes(here: Path, capsys: Any) -> None:
    np.savez("a.npz", x=X.astype("float64"), y=np.arange(5))
    batch = next(iter(load_data("a.npz", Two(), 8)))
    assert (batch["x"].dtype, batch["y"].dtype) == (torch.float32, torch.int64)
    assert capsys.readouterr().err == "x: float64 in the file, read as float32 like the model\n"
    assert next(iter(load_data("a.npz", Two(torch.float64), 8)))["x"].dtype == torch.float64
    assert capsys.readouterr().err == ""


def test_dtypes_that_numpy_has_not(here: Path) -> None:
    save_file({"x": torch.ones(3, 2, dtype=torch.bfloat16)}, "a.safetensors")
    assert next(iter(load_data("a.safetensors", Two(), 8)))["x"].dtype == torch.bfloat16


def test_batches_do_not_share_memory_with_the_file(here: Path) -> None:
    (here / "folder").mkdir()
    np.save("folder/x.npy", X)
    for batch in load_data("folder", Two(), 2):
        batch["x"].zero_()
    assert np.array_equal(np.load("folder/x.npy"), X)


@pytest.mark.parametrize("name", ["BATCHES", "loader", "generator"])
def test_iterables_by_import_path(here: Path, name: str) -> None:
    batches = load_data(f"zoo:{name}", Two(), 2)
    assert len(list(batches)) in (2, 3)
    assert isinstance(batches, DataLoader) == (name == "loader")


def test_dotted_modules(here: Path) -> None:
    (here / "pack").mkdir()
    (here / "pack" / "sets.py").write_text("class Sets:\n    small = [1, 2]\n")
    assert load_data("pack.sets:Sets.small", Two(), 2) == [1, 2]


def bad_files(here: Path) -> None:
    np.savez("unequal.npz", x=X, y=X[:3])
    np.savez("strange.npz", x=X, label=X)
    np.savez("objects.npz", x=np.array([{}, {}], dtype=object))
    np.savez("words.npz", x=np.array(["a", "b"]))
    np.savez("scalar.npz", x=np.float32(1), y=np.zeros(2))
    np.savez("none.npz")
    (here / "empty.npz").touch()
    (here / "text.npz").write_text("not a zip")
    (here / "text.safetensors").write_text("not safetensors at all")
    (here / "images.csv").write_text("1,2")
    torch.save(nn.Linear(1, 1), "objects.pt")
    (here / "text.pt").write_text("not torch's")
    torch.save({"x": [1, 2]}, "lists.pt")
    (here / "folder").mkdir()


BAD = {
    "missing": "nothing.npz",
    "missing-folder": "data/",
    "no-iterable": "zoo:number",
    "nothing": "zoo:nothing",
    "one-batch": "zoo:PAIR.nothing",
    "unequal": "unequal.npz",
    "strange": "strange.npz",
    "objects": "objects.npz",
    "words": "words.npz",
    "scalar": "scalar.npz",
    "none": "none.npz",
    "empty": "empty.npz",
    "text": "text.npz",
    "text-safetensors": "text.safetensors",
    "csv": "images.csv",
    "objects-pt": "objects.pt",
    "text-pt": "text.pt",
    "lists-pt": "lists.pt",
    "empty-folder": "folder",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_data(name: str, here: Path, snapshot: Callable[..., None]) -> None:
    bad_files(here)
    with pytest.raises(UsageError) as caught:
        load_data(BAD[name], Two(), 2)
    reason = str(caught.value).splitlines()[0]
    text = str(caught.value)
    if "cannot be read: " in reason:  # numpy's and safetensors' own words
        text = text.replace(reason.split("cannot be read: ")[1], "<reason>")
    snapshot(f"data-{name}", text)


def _written(*_: object) -> None:
    """Arrays of numbers, named after arguments of forward, with as many samples each."""
    np.savez("right.npz", x=X, y=X, flag=np.ones(5, bool))
    assert len(list(load_data("right.npz", Two(), 2))) == 3


BY_HAND = {
    "give a file": _written,
    "save plain arrays": _written,
    "name a list": lambda *_: load_data("zoo:BATCHES", Two(), 2),
    "it has: ": lambda *_: load_data("zoo:PAIR", Two(), 2),
    "axis 0 counts": _written,
    "name the arrays": _written,
}
