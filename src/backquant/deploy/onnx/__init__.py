"""ONNX: the writer that the targets onnx, openvino and others share."""

from __future__ import annotations

from backquant.deploy.onnx.exporter import untranslated
from backquant.deploy.onnx.writer import OPSET, onnx_model, qdq_model, save_onnx
from backquant.deploy.target import Requirement

__all__ = ["OPSET", "REQUIRES", "onnx_model", "qdq_model", "save_onnx", "untranslated"]

#: What writing a file takes.
REQUIRES = (
    Requirement("onnx", "onnx", "1.18", "1.23"),
    Requirement("onnxscript", "onnxscript", "0.7", "0.7"),
)
