"""The runtime's own errors, as ours."""

from __future__ import annotations

import pytest

from backquant.deploy.executorch.runtime import ExecuTorchModel, registered_kernels
from backquant.errors import ExportError


def test_broken_program(tmp_path) -> None:
    path = tmp_path / "m.pte"
    path.write_bytes(b"no program" * 100)
    with pytest.raises(ExportError, match="cannot load the program"):
        ExecuTorchModel(path)


def test_kernels_of_this_build() -> None:
    assert {"aten::add.out", "aten::mean.out"} <= registered_kernels()
