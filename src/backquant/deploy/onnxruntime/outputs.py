"""Outputs that are quantized for a reader inside of the model stay what they are.

ONNX Runtime moves a QuantizeLinear before what only moves values (a Transpose of the keys, before the product
of attention), and puts a DequantizeLinear behind it. Where the value that it comes to is an output of the
model, too, the output becomes the dequantized one, rounded and clipped (1.31: it counts readers inside of the
model only). So the file has the pair there, beside the output.
"""

from __future__ import annotations

from typing import Any

from backquant.deploy.onnxruntime.grids import has_one_scale, same_grid

_MOVING = frozenset({"Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def keep_outputs(model: Any) -> None:
    """Write such pairs, in place."""
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear" and has_one_scale(node):
            first = _first_after_output(node)
            if first is not None:
                _insert_pair(model, node, first)


def _first_after_output(quantize: Any) -> Any:
    """The node that reads an output of the model, at the other end of nodes that only move values, and that
    nothing but ``quantize``, and quantizations alike, reads."""
    value = quantize.inputs[0]
    if not all(
        user.op_type == "QuantizeLinear" and has_one_scale(user) and same_grid(quantize, user)
        for user, _ in value.uses()
    ):
        return None
    while True:
        node = value.producer()
        if node is None or node.op_type not in _MOVING or value.is_graph_output():
            return None
        value = node.inputs[0]
        if len(value.uses()) > 1:
            return None
        if value.is_graph_output():
            return node


def _insert_pair(model: Any, quantize: Any, reader: Any) -> None:
    import onnx_ir as ir

    value = reader.inputs[0]
    for kind in ("QuantizeLinear", "DequantizeLinear"):
        name = f"{quantize.name}/{kind}"
        node = ir.Node("", kind, [value, *quantize.inputs[1:]], name=name)
        node.metadata_props.update(quantize.metadata_props)
        value = node.outputs[0]
        value.name, value.shape = f"{name}_0", reader.inputs[0].shape
        value.type = quantize.outputs[0].type if kind == "QuantizeLinear" else reader.inputs[0].type
        model.graph.insert_before(reader, node)
    reader.replace_input_with(0, value)
