"""The runtime's own errors, as ours."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from backquant.deploy.executorch.lowering import ExecuTorchModel, lower_program, registered_kernels
from backquant.deploy.program import export_program
from backquant.errors import ExportError


def test_broken_program(tmp_path) -> None:
    path = tmp_path / "m.pte"
    path.write_bytes(b"no program" * 100)
    with pytest.raises(ExportError, match="cannot load the program"):
        ExecuTorchModel(path)


def test_kernels_of_this_build() -> None:
    assert {"aten::add.out", "aten::mean.out"} <= registered_kernels()


def test_a_call_that_the_runtime_refuses() -> None:
    program = export_program(fx.symbolic_trace(nn.ReLU()), (torch.zeros(2, 3),), {}, None)
    run = ExecuTorchModel(lower_program(program).buffer)
    assert run(-torch.ones(2, 3)).tolist() == torch.zeros(2, 3).tolist()
    with pytest.raises(ExportError, match="cannot run the program"):
        run(torch.zeros(5, 7))
