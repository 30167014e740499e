"""Norms and sums of what was integers before: OpenVINO (2026.4) moves the scale of integers behind them.

1. A norm that takes their mean and divides by their deviation keeps its epsilon: where values are small it is
   too small, by the square of the scale (xLSTM: 6.6 dB in place of 33).
2. Sums and means of integers of three axes (tokens of sequences) are right in the first sample alone.

A maximum that changes nothing, which no scale passes, is put in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.rewrite import OnnxCalls, rewrite

_NORMS = (
    *("GroupNormalization", "InstanceNormalization", "LayerNormalization"),
    "MeanVarianceNormalization",
)
_SUMS = ("ReduceMean", "ReduceSum")
#: Operators that OpenVINO takes a scale through.
_PASSED = frozenset(
    "Reshape Transpose Flatten Squeeze Unsqueeze Slice Gather Split Identity Concat Expand Pad Tile "  # noqa: SIM905
    "MaxPool Relu Clip PRelu LeakyRelu AveragePool ReduceMax ReduceMean ReduceMin ReduceSum "
    "DepthToSpace SpaceToDepth Mul Div".split()
)
_SCALED = frozenset({"MatMul", "Conv", "ConvTranspose", "Gemm", "DequantizeLinear"})
_SEQUENCES = 3  # axes
_LEAST = np.finfo(np.float32).min


def keep_scales_before_norms(model: Any) -> None:
    """Put such a maximum before every norm or sum that scales could reach. Changes an ``onnx_ir.Model``."""
    rewrite(model, dict.fromkeys((*_NORMS, *_SUMS), _keep_scale))


def _keep_scale(node: Any) -> None:
    value, write = node.inputs[0], OnnxCalls(node)
    if not _comes_from_integers(value):
        return
    # rule 2; an unknown number of axes may be three
    if node.op_type in _NORMS or value.shape is None or len(value.shape) == _SEQUENCES:
        kept = write.Max(value, write.constant(_LEAST))
        kept.shape = value.shape
        node.replace_input_with(0, kept)


def _comes_from_integers(value: Any) -> bool:
    """Whether ``value``, a float, is what comes from integers times a scale."""
    if value is None or value.dtype is None or value.dtype.name != "FLOAT":
        return False
    pending, seen = [value], set()
    while pending:
        node = pending.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in _SCALED:
            return True
        if node.op_type in _PASSED:
            pending += [given for given in node.inputs if given is not None]
    return False
