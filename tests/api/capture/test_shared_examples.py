"""Example inputs that are one tensor, as ``h = c = torch.zeros(...)``, or a decoder that is shown itself.

``torch.export`` (2.13) takes them for one argument: what it captures reads the first in place of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import backquant

SIZES = 2, 5, 16
Measure = Callable[[torch.Tensor, torch.Tensor], float]


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerDecoderLayer(16, 2, 32, batch_first=True).eval()


def two(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(SIZES, generator=made), torch.randn(SIZES, generator=made)


def test_export_merges_arguments_that_are_one_tensor(sqnr: Measure) -> None:
    """Torch's defect, for which examples are copied."""
    x, model = torch.randn(SIZES), decoder()
    with torch.no_grad():
        wanted = model(*two(0))
        found = torch.export.export(model, (x, x)).module()(*two(0))
    assert sqnr(wanted, found) < 20


def test_what_is_captured_reads_each_argument() -> None:
    x, model = torch.randn(SIZES), decoder()
    shared, apart = (
        backquant.quantize(model, given, calibration=[two(1)], capture="export", slower="keep")
        for given in ((x, x), two(2))
    )
    assert torch.equal(shared(*two(0)), apart(*two(0)))


def test_what_is_exported_reads_each_argument(tmp_path: Path, sqnr: Measure) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    x, model = torch.randn(SIZES), decoder()
    quantized = backquant.quantize(
        model, (x, x), backend="onnxruntime", calibration=[two(1)], slower="keep"
    )
    path = tmp_path / "model.onnx"
    backquant.export(quantized, path, example_inputs=(x, x), require=0.0)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    fed = {name: tensor.numpy() for name, tensor in zip(names, two(0), strict=True)}
    [found] = session.run(None, fed)
    assert sqnr(quantized(*two(0)), torch.from_numpy(found)) > 40
