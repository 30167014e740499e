"""torchvision is imported with operators of its own where they load, with their schemas alone elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.stock import has_operators


def test_a_library_that_does_not_load_is_none(tmp_path: Path) -> None:
    assert not has_operators([tmp_path])
    (tmp_path / "_C_stable.so").write_bytes(b"for another torch")
    assert not has_operators([tmp_path])


def test_a_library_that_loads_is_found(tmp_path: Path) -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # loaded already
    (tmp_path / "_C.so").symlink_to(library)
    assert has_operators([tmp_path / "not there", tmp_path])


def test_either_way_it_is_imported() -> None:
    import torchvision

    assert torchvision.models.resnet18(weights=None).fc.out_features == 1000
