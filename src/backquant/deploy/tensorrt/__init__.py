"""TensorRT: the rules that its documentation states for quantized ONNX files, and a target."""

from __future__ import annotations

from backquant.deploy.tensorrt.check import check_onnx
from backquant.deploy.tensorrt.rules import RULES
from backquant.deploy.tensorrt.view import Finding, Rule

__all__ = ["RULES", "Finding", "Rule", "check_onnx"]
