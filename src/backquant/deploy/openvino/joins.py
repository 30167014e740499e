"""Joined values that products read as integers: OpenVINO (2026.4) rounds the parts, with one zero point for
each place along the axis that they are joined on. Matrix products fail on that, and convolutions become
floats unless that axis holds channels. An axis of one between the join and its rounding keeps them apart.
"""

from __future__ import annotations

from typing import Any

from backquant.deploy.onnx.rewrite import OnnxCalls, only_reader, readers_of, replace, rewrite

_PRODUCTS = frozenset({"MatMul", "Gemm"})
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})


def round_whole(model: Any) -> None:
    """Let what is joined be rounded where products alone read it. Changes an ``onnx_ir.Model``."""
    rewrite(model, {"Concat": _round_whole})


def _round_whole(node: Any) -> None:
    rounded = only_reader(node, "QuantizeLinear")
    back = None if rounded is None else only_reader(rounded, "DequantizeLinear")
    if rounded is None or back is None:
        return
    readers = readers_of(back)
    fails = _PRODUCTS if _joins_channels(node) else _PRODUCTS | _CONVOLUTIONS
    if readers and all(reader.op_type in fails for reader in readers):
        axis = OnnxCalls(node).constant([0])
        longer = OnnxCalls(rounded).Unsqueeze(node.outputs[0], axis)
        whole = OnnxCalls(rounded).again(longer, *rounded.inputs[1:])
        floats = OnnxCalls(back).again(whole, *back.inputs[1:])
        replace(back, OnnxCalls(back).Squeeze(floats, axis))


def _joins_channels(node: Any) -> bool:
    axis, shape = node.attributes["axis"].as_int(), node.outputs[0].shape
    return axis == 1 or (shape is not None and axis + len(shape) == 1)
