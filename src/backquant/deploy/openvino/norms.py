"""Norms of what was integers before.

OpenVINO (2026.4) moves the scale of integers behind a norm that takes their mean and divides by their
deviation, and leaves the norm's epsilon as it was: where values are small it is too small, by the square of
the scale (xLSTM: 6.6 dB in place of 33). A maximum that changes nothing, which no scale passes, is put in
between.
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
_LEAST = np.finfo(np.float32).min


def keep_scales_before_norms(model: Any) -> None:
    """Put such a maximum before every norm that scales could reach. Changes an ``onnx_ir.Model``."""
    import onnx_ir as ir

    for node in list(model.graph):
        if node.op_type not in _NORMS or not _comes_from_integers(node.inputs[0]):
            continue
        value = node.inputs[0]
        least = add_initializer(model, np.array(_LEAST, np.float32), f"{node.name}/least")
        kept = ir.Node("", "Max", [value, least], name=f"{node.name}/kept")
        kept.metadata_props.update(node.metadata_props)
        result = kept.outputs[0]
        result.name, result.type, result.shape = f"{value.name}_kept", value.type, value.shape
        model.graph.insert_before(node, kept)
        node.replace_input_with(0, result)


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
