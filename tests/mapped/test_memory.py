"""Mapped tensors take no more memory than they may, and keep their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backquant.errors import ArtifactError
from backquant.mapped import MappedMemory, WeightFiles

MIB = 1 << 20


def resident() -> float:
    """MiB of mapped files in memory."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return int(next(row for row in rows if row.startswith("RssFile")).split()[1]) / 1024


def test_what_was_used_is_given_back(tmp_path: Path) -> None:
    drawn = {f"w{number}": torch.randn(4 * MIB // 4) for number in range(12)}
    wanted = {name: float(tensor.sum()) for name, tensor in drawn.items()}
    save_file(drawn, tmp_path / "all.safetensors")
    del drawn
    start = resident()
    with MappedMemory(tmp_path, resident=8 * MIB) as memory:
        tensors = dict(WeightFiles.of(tmp_path).tensors(memory))
        for _ in range(2):
            for name, tensor in tensors.items():
                assert float(tensor.sum()) == wanted[name]
                assert resident() - start < 16
    assert [item.name for item in tmp_path.iterdir()] == ["all.safetensors"]


def test_kept_tensors_are_what_they_were(tmp_path: Path) -> None:
    """Also one that is written to: its pages are in no file, and stay."""
    with MappedMemory(tmp_path, resident=0) as memory:
        values = torch.arange(1 << 17, dtype=torch.int32)
        kept, written = memory.kept(values), memory.kept(values)
        assert kept.data_ptr() != values.data_ptr()
        assert memory.kept(kept) is kept
        written[0] = 7
        for _ in range(3):
            assert torch.equal(kept, values)
            assert written[:3].tolist() == [7, 1, 2]
        turned = values.view(2, -1).t()
        assert memory.kept(turned) is turned  # strides would be lost
        assert memory.kept(values[:8]).data_ptr() == values.data_ptr()


def test_a_folder_that_cannot_be_written(tmp_path: Path, snapshot: Callable[..., None]) -> None:
    with pytest.raises(ArtifactError) as caught, MappedMemory(tmp_path / "gone") as memory:
        memory.kept(torch.zeros(1 << 16))
    snapshot("no-folder", caught.value)
