"""Names of a file that Python would normalise, or read as something else: labels at most, never calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.artifact.file import manifest_text, packed, read_file
from backquant.artifact.labels import renamed
from backquant.errors import ArtifactError
from backquant.graph.call_table import CallTableModule
from backquant.runtime import QuantizedModel

WIDE = {ord(c): ord(c) + 0xFEE0 for c in map(chr, range(0x21, 0x7F)) if c != "."}
Rows = list[dict[str, Any]]


def rewritten(model: QuantizedModel, path: Path, change: Callable[[Rows], object]) -> Path:
    """The file of ``model`` with other nodes, and digests that are right."""
    backquant.save(model, path)
    document, tensors = read_file(path)
    change(document["model"]["graph"])
    path.write_bytes(packed(manifest_text(document, tensors), tensors))
    return path


def call(rows: Rows, op: str, target: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    row = {"op": op, "name": "extra", "target": target, "args": args, "kwargs": kwargs}
    rows.insert(1, row)


def test_functions_are_not_reached_through_a_path(
    quantized: QuantizedModel, tmp_path: Path
) -> None:
    """In source text the wide spelling of the first one is the namespace of ``forward``."""
    for target in ("forward.__globals__.get", "conv1.forward", "__class__"):
        for spelled in (target, target.translate(WIDE)):
            path = rewritten(
                quantized,
                tmp_path / "m.bq",
                lambda rows, spelled=spelled: call(rows, "call_module", spelled, ["eval"], {}),  # type: ignore[misc]
            )
            with pytest.raises(ArtifactError) as caught:
                backquant.load(path)
            assert str(caught.value.what).isascii()


@pytest.mark.parametrize("name", ["size", "out", "names"])
def test_keywords_are_compared_as_python_reads_them(
    name: str, quantized: QuantizedModel, tmp_path: Path
) -> None:
    wide = {name.translate(WIDE): [65536, 65536]}
    path = rewritten(
        quantized,
        tmp_path / "m.bq",
        lambda rows: call(rows, "call_function", "torch.zeros", [], wide),
    )
    with pytest.raises(ArtifactError, match="is no name of an argument"):
        backquant.load(path)


@pytest.mark.parametrize(
    "name",
    ["\uff46orward", "e\u0301", "in", "class", "__class__", "a b", "a'b", "\u202ex", "1", ""],
)
def test_nodes_arguments_and_methods_have_ascii_identifiers(
    name: str, quantized: QuantizedModel, tmp_path: Path
) -> None:
    changes: list[Callable[[Rows], object]] = [
        lambda rows: rows[0].update(target=name),
        lambda rows: rows[0].update(name=name),
        lambda rows: call(rows, "call_method", name, [{"node": rows[0]["name"]}], {}),
        lambda rows: call(rows, "call_function", "torch.ones", [[1]], {name: 1}),
    ]
    for change in changes:
        with pytest.raises(ArtifactError):
            backquant.load(rewritten(quantized, tmp_path / "m.bq", change))


def test_other_names_of_modules_are_labels(
    wrapped: Callable[[nn.Module], QuantizedModel], tmp_path: Path
) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict(
                {"3x3 conv": nn.Linear(2, 2), "Gr\u00f6\u00dfe": nn.Linear(2, 2)}
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for head in self.heads.values():
                x = head(x)
            return x

    model = wrapped(Heads())
    backquant.save(model, tmp_path / "m.bq")
    loaded = backquant.load(tmp_path / "m.bq")
    x = torch.randn(3, 2)
    assert torch.equal(loaded(x), model(x))
    assert all(name.isascii() for name, _ in loaded.graph_module.named_modules())
    assert isinstance(loaded.graph_module, CallTableModule)


def test_keywords_of_functions_that_choose_another_are_stored(
    wrapped: Callable[[nn.Module], QuantizedModel], tmp_path: Path
) -> None:
    class Pooled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.max_pool2d(x, 2, ceil_mode=True, return_indices=False)
            y = nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
            return torch.softmax(y.sum(axis=1, keepdim=True).to(dtype=torch.float32), dim=-1)

    model = wrapped(Pooled())
    backquant.save(model, tmp_path / "m.bq")
    x = torch.randn(1, 2, 5, 5)
    assert torch.equal(backquant.load(tmp_path / "m.bq")(x), model(x))


def test_unknown_keywords_are_refused(
    quantized: QuantizedModel, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    path = rewritten(
        quantized,
        tmp_path / "m.bq",
        lambda rows: call(rows, "call_function", "torch.ops.aten.relu.default", [], {"dim": 1}),
    )
    with pytest.raises(ArtifactError) as refused:
        backquant.load(path)
    snapshot("keyword", refused.value)


def test_a_path_is_no_name_in_a_table(snapshot: Callable[..., None]) -> None:
    with pytest.raises(ArtifactError) as refused:
        renamed({"block": 1, "block.weight": 2}, "the model")
    snapshot("path-in-a-table", refused.value)
