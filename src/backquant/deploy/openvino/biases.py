"""Biases as OpenVINO (2026.4) takes them.

A bias of its own for each convolution: OpenVINO leaves one that several convolutions read out of their
kernels, and computes it, and what would be fused behind it, in a generated kernel on floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer

_BIAS = 2
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
#: What moves values, and sums of them: OpenVINO takes scales through these.
_MOVES = frozenset(
    [
        *("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "Split"),
        *("Concat", "Expand", "Pad", "Tile", "ReduceMean", "ReduceSum"),
    ]
)
_LEAST = np.float32(2.0**-126)  # the smallest normal number


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


def keep_zero_biases(model: Any) -> None:
    """Give layers without a bias, or with one of zeros, a bias that adds nothing.

    OpenVINO moves the scales of such a layer behind what moves its result (``Reshape`` and the like), and
    throws where sizes of 1 or new dimensions make that ambiguous: layers of one token, ``unfold``. With
    a bias that is not zero it leaves them: ``_LEAST`` changes no float above 1e-30. Changes an
    ``onnx_ir.Model``.
    """
    for node in list(model.graph):
        if node.op_type not in ("MatMul", "Conv") or not _has_integer_weight(node):
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if len(readers) == 1 and readers[0].op_type == "Add":
            _replace_zeros(model, readers[0])
        elif any(reader.op_type in _MOVES for reader in readers):
            if node.op_type == "MatMul":
                _add_nothing(model, node)
            elif len(node.inputs) == _BIAS:
                node.resize_inputs(_BIAS + 1)
                node.replace_input_with(_BIAS, _nothing(model, node, 0))


def _nothing(model: Any, layer: Any, axis: int) -> Any:
    width = int(layer.inputs[1].producer().inputs[0].shape[axis])
    return add_initializer(model, np.full(width, _LEAST), f"{layer.name}/no_bias")


def _add_nothing(model: Any, product: Any) -> None:
    import onnx_ir as ir

    result = product.outputs[0]
    adds = ir.Node("", "Add", [result, _nothing(model, product, -1)], name=f"{product.name}/bias")
    adds.metadata_props.update(product.metadata_props)
    biased = adds.outputs[0]
    biased.name, biased.type, biased.shape = f"{result.name}_biased", result.type, result.shape
    model.graph.insert_after(product, adds)
    result.replace_all_uses_with(biased, replace_graph_outputs=True)
    adds.replace_input_with(0, result)


def _has_integer_weight(product: Any) -> bool:
    source = product.inputs[1].producer()
    return (
        source is not None
        and source.op_type == "DequantizeLinear"
        and source.inputs[0].const_value is not None
    )


def _replace_zeros(model: Any, adds: Any) -> None:
    """The constant zeros that ``adds`` adds, where something that moves values reads its result."""
    if not any(use.node.op_type in _MOVES for use in adds.outputs[0].uses()):
        return
    for place, value in enumerate(adds.inputs):
        held = None if value.const_value is None else value.const_value.numpy()
        if held is not None and held.dtype == np.float32 and not held.any():
            bias = add_initializer(model, np.full(held.shape, _LEAST), f"{adds.name}/zeros")
            adds.replace_input_with(place, bias)
