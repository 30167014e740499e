"""What a file calls something decides nothing: it is what was saved, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.artifact.file import manifest_text, packed, read_file
from backquant.errors import ArtifactError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    path = tmp_path / "m.bq"
    backquant.save(backquant.quantize(layers, calibration=[torch.randn(8, 4)]), path)
    return path, *read_file(path)


def test_a_kernel_refuses_tensors_that_it_does_not_have(
    saved: tuple[Path, dict[str, Any], dict[str, torch.Tensor]], snapshot: Callable[..., None]
) -> None:
    """Its bias would be left out without a word."""
    path, document, tensors = saved
    buffers = document["model"]["children"]["0"]["buffers"]
    buffers["b\uff49as"] = buffers.pop("bias")
    path.write_bytes(packed(manifest_text(document, tensors), tensors))
    with pytest.raises(ArtifactError) as refused:
        backquant.load(path)
    error = refused.value
    snapshot("tensor", ArtifactError(error.what, where=error.where.rpartition(": ")[2]))


def test_a_manifest_has_no_key_twice(
    saved: tuple[Path, dict[str, Any], dict[str, torch.Tensor]], snapshot: Callable[..., None]
) -> None:
    """Two modules under one name would be one, and both calls go to it."""
    path, document, tensors = saved
    del document["reference"]  # which has these names, too
    text = manifest_text(document, tensors).replace('"2": {"training"', '"0": {"training"')
    assert text.count('"0": {"training"') == 2
    path.write_bytes(packed(text, tensors))
    with pytest.raises(ArtifactError) as refused:
        backquant.load(path)
    error = refused.value
    snapshot("twice", ArtifactError(error.what, where=error.where.rpartition(": ")[2]))
