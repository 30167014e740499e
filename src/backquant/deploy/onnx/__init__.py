"""ONNX: the writer that the targets onnx, openvino and others share."""

from __future__ import annotations

from backquant.deploy.onnx.check import untranslated
from backquant.deploy.onnx.writer import OPSET, onnx_model, save_onnx

__all__ = ["OPSET", "onnx_model", "save_onnx", "untranslated"]
