"""A quantized model, handed to PyTorch's own exporters and compiler: what it becomes, or what to do."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant import UsageError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
FIX_NAMES = {"x": X}


def _quantized(backend: str) -> backquant.QuantizedModel:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    return backquant.quantize(model, calibration=[X], backend=backend, slower="keep")


@pytest.mark.parametrize("backend", ["x86", "onednn", "fbgemm", "qnnpack"])
def test_kernels_are_not_exported(backend: str, snapshot: Callable[..., None]) -> None:
    with pytest.raises(UsageError) as refused:
        torch.export.export(_quantized(backend), (X,))
    snapshot("torch.export", refused.value)


def test_kernels_within_a_module_are_not_exported(snapshot: Callable[..., None]) -> None:
    pipeline = nn.Sequential(_quantized("x86"), nn.Softmax(-1))
    with pytest.raises(UsageError) as refused:
        torch.export.export(pipeline, (X,))
    snapshot("torch.export", refused.value)


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "onnxruntime", "xnnpack"])
def test_a_strict_export_says_what_to_do(backend: str, snapshot: Callable[..., None]) -> None:
    quantized = _quantized(backend)
    with pytest.raises(UsageError) as refused:
        torch.export.export(quantized, (X,), strict=True)
    snapshot("torch.export" if quantized.engine else "torch.export-strict", refused.value)


def test_the_onnx_exporter_has_it_as_its_cause() -> None:
    with pytest.raises(torch.onnx.OnnxExporterError) as refused:
        torch.onnx.export(_quantized("x86"), (X,), io.BytesIO(), dynamo=True, verbose=False)
    assert isinstance(refused.value.__cause__, UsageError)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own calls
@pytest.mark.parametrize("backend", ["x86", "onnxruntime", "xnnpack"])
def test_the_older_exporter_is_refused(backend: str, snapshot: Callable[..., None]) -> None:
    with pytest.raises(UsageError) as refused:
        torch.onnx.export(_quantized(backend), (X,), io.BytesIO(), dynamo=False)
    snapshot("torch.onnx-of-TorchScript", refused.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's own calls
@pytest.mark.parametrize("how", ["torch.export", "torch.onnx"])
def test_the_fix_works(how: str) -> None:
    quantized = _quantized("onnxruntime")
    exported: Any = torch.export.export(quantized, (X,))
    if how == "torch.onnx":
        exported = torch.onnx.export(quantized, (X,), dynamo=True, verbose=False)
        assert "QuantizeLinear" in {node.op_type for node in exported.model.graph}
        return
    assert torch.equal(exported.module()(X), quantized(X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own calls
def test_what_torch_compile_gives_is_the_same() -> None:
    quantized = _quantized("x86")
    assert torch.equal(torch.compile(quantized)(X), quantized(X))
