"""Joined values that products read as integers: OpenVINO (2026.4) rounds the parts, with one zero point for
each place along the axis that they are joined on. Matrix products fail on that, and convolutions become
floats unless that axis holds channels. An axis of one between the join and its rounding keeps them apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer

_PRODUCTS = frozenset({"MatMul", "Gemm"})
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
_ROUND, _BACK = "QuantizeLinear", "DequantizeLinear"


def round_whole(model: Any) -> None:
    """Let what is joined be rounded where products alone read it. Changes an ``onnx_ir.Model``."""
    for node in list(model.graph):
        rounded = _only_reader(node, _ROUND) if node.op_type == "Concat" else None
        back = None if rounded is None else _only_reader(rounded, _BACK)
        if rounded is None or back is None:
            continue
        uses = list(back.outputs[0].uses())
        fails = _PRODUCTS if _joins_channels(node) else _PRODUCTS | _CONVOLUTIONS
        if uses and all(use.node.op_type in fails for use in uses):
            axis = add_initializer(model, np.array([0], np.int64), f"{node.name}/axis")
            longer = put_after(model, node, "Unsqueeze", axis)
            rounded.replace_input_with(0, longer)
            rounded.outputs[0].shape = back.outputs[0].shape = None  # inferred anew
            shorter = put_after(model, back, "Squeeze", axis)
            for use in uses:
                use.node.replace_input_with(use.idx, shorter)


def _joins_channels(node: Any) -> bool:
    axis, shape = node.attributes["axis"].as_int(), node.outputs[0].shape
    return axis == 1 or (shape is not None and axis + len(shape) == 1)


def _only_reader(node: Any, kind: str) -> Any:
    uses = list(node.outputs[0].uses())
    found = len(uses) == 1 and uses[0].idx == 0 and uses[0].node.op_type == kind
    return uses[0].node if found and not node.outputs[0].is_graph_output() else None


def put_after(model: Any, node: Any, kind: str, axis: Any) -> Any:
    """What a new node (``Squeeze``, ``Unsqueeze``), behind ``node``, makes of its result."""
    import onnx_ir

    value = node.outputs[0]
    made = onnx_ir.Node("", kind, [value, axis], name=f"{node.name}/{kind}")
    made.outputs[0].name, made.outputs[0].type = f"{value.name}/{kind}", value.type
    model.graph.insert_after(node, made)
    return made.outputs[0]
