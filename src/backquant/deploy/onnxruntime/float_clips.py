"""What clips the floats of a product on integers, written as ``Max`` and ``Min``.

ONNX Runtime looks through a Relu or Clip behind a product for the QuantizeLinear, and where none follows (the
logarithm of a mel spectrogram) it leaves the product in float, though it has a kernel on integers that gives
floats. Through Max and Min it does not look, and they give the same values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer

_PRODUCTS = frozenset({"MatMul", "Gemm"})


def show_products(model: Any) -> None:
    """Rewrite, in place, every Relu and Clip of a product on integers whose result stays float."""
    for node in list(model.graph):
        if node.op_type in ("Relu", "Clip") and _hides_product(node):
            _rewrite(model, node)


def _hides_product(node: Any) -> bool:
    product = node.inputs[0].producer()
    if product is None or product.op_type not in _PRODUCTS:
        return False
    sources = [value.producer() for value in product.inputs[:2]]
    if any(source is None or source.op_type != "DequantizeLinear" for source in sources):
        return False
    readers = [use.node.op_type for use in node.outputs[0].uses()]
    return any(reader != "QuantizeLinear" for reader in readers)


def _rewrite(model: Any, node: Any) -> None:
    import onnx_ir as ir

    if node.op_type == "Relu":
        zero = np.zeros((), node.inputs[0].dtype.numpy())
        bounds = [add_initializer(model, zero, f"{node.outputs[0].name}_bound"), None]
    else:
        bounds = [*node.inputs[1:], None, None][:2]
    value, result = node.inputs[0], node.outputs[0]
    steps = [
        (kind, bound)
        for kind, bound in zip(("Max", "Min"), bounds, strict=True)
        if bound is not None
    ]
    for kind, bound in steps:
        clipped = ir.Node("", kind, [value, bound], name=f"{node.name}/{kind}")
        clipped.metadata_props.update(node.metadata_props)
        model.graph.insert_before(node, clipped)
        value = clipped.outputs[0]
        value.type, value.shape = result.type, result.shape
        value.name = f"{result.name}_{kind.lower()}"
    value.name, result.name = result.name, value.name
    result.replace_all_uses_with(value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
