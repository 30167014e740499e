"""A bias of its own for each convolution: OpenVINO (2026.4) leaves one that several convolutions read out of
their kernels, and computes it, and what would be fused behind it, in a generated kernel on floats."""

from __future__ import annotations

from typing import Any

from backquant.deploy.onnx.fold import add_initializer

_BIAS = 2
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})


def separate_biases(model: Any) -> None:
    """Give every convolution but the first that reads a bias a copy of it. Changes an ``onnx_ir.Model``."""
    read: set[str] = set()
    for node in model.graph:
        if node.op_type not in _CONVOLUTIONS or len(node.inputs) <= _BIAS:
            continue
        bias = node.inputs[_BIAS]
        if bias is None or bias.const_value is None:
            continue
        if bias.name in read:
            copied = add_initializer(model, bias.const_value.numpy(), bias.name)
            node.replace_input_with(_BIAS, copied)
        read.add(bias.name)
