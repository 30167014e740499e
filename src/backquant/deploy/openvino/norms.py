"""Norms and sums of what was integers before: OpenVINO (2026.4) moves the scale of integers behind them.

1. A norm that takes their mean and divides by their deviation keeps its epsilon: where values are small it is
   too small, by the square of the scale (xLSTM: 6.6 dB in place of 33).
2. Sums and means of integers of three axes (tokens of sequences) are right in the first sample alone.

A maximum that changes nothing, which no scale passes, is put in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer

_NORMS = frozenset(
    "GroupNormalization InstanceNormalization LayerNormalization MeanVarianceNormalization".split()  # noqa: SIM905
)
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
    import onnx_ir as ir

    for node in list(model.graph):
        is_norm = node.op_type in _NORMS or _sums_sequences(node)
        if not is_norm or not _comes_from_integers(node.inputs[0]):
            continue
        value = node.inputs[0]
        least = add_initializer(model, np.array(_LEAST, np.float32), f"{node.name}/least")
        kept = ir.Node("", "Max", [value, least], name=f"{node.name}/kept")
        kept.metadata_props.update(node.metadata_props)
        result = kept.outputs[0]
        result.name, result.type, result.shape = f"{node.name}/kept", value.type, value.shape
        model.graph.insert_before(node, kept)
        node.replace_input_with(0, result)


def _sums_sequences(node: Any) -> bool:
    """Rule 2; an unknown number of axes may be three."""
    if node.op_type not in ("ReduceMean", "ReduceSum"):
        return False
    shape = node.inputs[0].shape
    return shape is None or len(shape) == _SEQUENCES


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
