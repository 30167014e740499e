"""Reductions whose result is scaled by channel, and then quantized.

OpenVINO (2026.4) makes one quantization, with a range for each channel, of a batch norm, factor or addend
and of the quantization behind it, and computes it at the end of the reduction before it. Where the reduced
axes are left out of the result it mixes up the channels. So they are kept, with length one, and left out
behind.
"""

from __future__ import annotations

from typing import Any

from backquant.deploy.openvino.joins import put_after

_SCALING = frozenset({"Add", "BatchNormalization", "Div", "Mul", "Sub"})
_AXES = 1  # the input that names them


def keep_reduced_axes(model: Any) -> None:
    """Write such reductions so. Changes an ``onnx_ir.Model``."""
    import onnx_ir

    for node in list(model.graph):
        if not node.op_type.startswith("Reduce") or len(node.inputs) <= _AXES:
            continue
        keeps = node.attributes.get("keepdims")
        if (keeps is None or keeps.as_int()) or not _is_scaled_and_quantized(node):
            continue
        node.attributes["keepdims"] = onnx_ir.AttrInt64("keepdims", 1)
        value = node.outputs[0]
        readers, shape = list(value.uses()), value.shape
        shorter = put_after(model, node, "Squeeze", node.inputs[_AXES])
        value.shape, shorter.shape = None, shape
        for reader in readers:
            reader.node.replace_input_with(reader.idx, shorter)


def _is_scaled_and_quantized(node: Any) -> bool:
    """Whether one node after another scales the result, which nothing else reads, up to a quantization."""
    scaled = False
    while True:
        value = node.outputs[0]
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output():
            return False
        node = uses[0].node
        if node.op_type not in _SCALING:
            return scaled and node.op_type == "QuantizeLinear"
        scaled = True
