"""Exported programs and ``.pt2`` files as models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import CaptureError, UsageError
from backquant.graph.export import load_exported


def _exported(model: nn.Module) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    return torch.export.export(model, (torch.randn(2, 3, 8, 8),), dynamic_shapes=shapes)


def test_a_program_gives_what_its_model_gives(
    cnn: nn.Module, make_images: Callable[..., list[torch.Tensor]]
) -> None:
    batches = make_images()
    program = _exported(cnn)
    quantized = backquant.quantize(program, calibration=batches)
    traced = backquant.quantize(cnn, calibration=batches)
    assert quantized.kernels == traced.kernels
    x = make_images(1, batch=3)[0]
    assert torch.equal(quantized(x), traced(x))
    wanted = program.module()(x)
    assert torch.equal(wanted, cnn(x))  # neither program nor model was changed


def test_what_torch_remarks_while_it_reads_a_file_is_not_told(
    cnn: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.export.save(_exported(cnn), tmp_path / "model.pt2")
    load = torch.export.load

    def remarking(path: str) -> torch.export.ExportedProgram:
        warnings.warn("The given buffer is not writable", UserWarning, stacklevel=2)
        return load(path)

    monkeypatch.setattr(torch.export, "load", remarking)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_exported(tmp_path / "model.pt2").program is not None


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_file(
    cnn: nn.Module,
    decomposed: bool,
    make_images: Callable[..., list[torch.Tensor]],
    tmp_path: Path,
) -> None:
    """Core ATen operators (``addmm``, ``convolution``, pairs from pooling) become the same modules."""
    program = _exported(cnn)
    if decomposed:
        with warnings.catch_warnings():  # torch's own, about its pytree
            warnings.simplefilter("ignore", FutureWarning)
            program = program.run_decompositions()
    torch.export.save(program, tmp_path / "model.pt2")
    batches = make_images()
    quantized = backquant.quantize(tmp_path / "model.pt2", calibration=batches)
    traced = backquant.quantize(cnn, calibration=batches)
    x = make_images(1, batch=3)[0]
    left = {use.kernel.replace("flatten", "view") for use in traced.kernels}
    assert {use.kernel.replace("flatten", "view") for use in quantized.kernels} == left
    assert torch.allclose(quantized(x), traced(x), atol=0.05)
    backquant.save(quantized, tmp_path / "model.bq")
    assert torch.equal(backquant.load(tmp_path / "model.bq")(x), quantized(x))


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        backquant.explain(tmp_path / "none.pt2", torch.ones(1))
    (tmp_path / "text.pt2").write_text("no program")
    with pytest.raises(CaptureError, match="holds no exported program"):
        backquant.explain(str(tmp_path / "text.pt2"), torch.ones(1))


def test_a_program_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    program = torch.export.export(model, (torch.ones(2, 4),))
    with pytest.raises(CaptureError, match="training mode"):
        backquant.explain(program, torch.ones(2, 4))


@pytest.mark.parametrize("backend", ["qnnpack_pt2e", "executorch", "native"])
def test_aten_entries_and_others(cnn: nn.Module, backend: str) -> None:
    """qnnpack_pt2e is written in aten operators; they stand for the modules."""
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    quantized = backquant.quantize(_exported(cnn), backend=backend, calibration=batches)
    rows = quantized.report.rows
    weighted = [row for row in rows if row.multiply_adds]
    assert weighted and all(row.quantized for row in weighted), [
        (row.operator, row.outcome) for row in rows
    ]
    with torch.no_grad():
        wanted = cnn(batches[0])
    assert (quantized(batches[0]) - wanted).abs().max() < 0.3
