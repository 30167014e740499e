"""Convolutions that OpenVINO never finishes to compile.

Depthwise ones of 16 channels with 14 taps and more along the last axis (2026.4; docs/kernels.md): its oneDNN
writes code without end, for integers, which the description leaves out, and for bfloat16, in which OpenVINO
computes what is float where the CPU has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backquant.errors import ExportError
from backquant.lower.machine import machine_facts

_CHANNELS, _TAPS = 16, 14


def check_ends(nodes: Iterable[Any]) -> None:
    """Raise ``ExportError`` if one of the nodes, of an ONNX graph, is such a convolution, and the CPU has
    bfloat16."""
    if not machine_facts().capabilities.get("avx512_bf16"):
        return
    for node in nodes:
        if node.op_type == "Conv" and never_ends(node):
            raise ExportError(
                "OpenVINO never finishes to compile a depthwise convolution of 16 channels with 14 taps or "
                "more along its last axis on this CPU, not even in float",
                where=f"node {node.name}",
                fix='backend="onnxruntime", which runs it on integers',
            )


def never_ends(node: Any) -> bool:
    """Whether ``node`` is such a convolution.

    >>> import onnx_ir
    >>> weight = onnx_ir.Value(name="w", shape=onnx_ir.Shape([16, 1, 1, 16]))
    >>> node = onnx_ir.node("Conv", [onnx_ir.Value(name="x"), weight], {"group": 16})
    >>> never_ends(node)
    True
    """
    shape = node.inputs[1].shape
    if shape is None or not all(isinstance(size, int) for size in shape):
        return False
    attributes = node.attributes
    last = [attributes.get_ints(name, [1])[-1] for name in ("strides", "dilations")]
    depthwise = attributes.get_int("group", 1) == shape[0] == _CHANNELS
    return bool(depthwise and last == [1, 1] and shape[-1] >= _TAPS)
