"""Constants of an ONNX graph: adding one, dropping those that nothing reads."""

from __future__ import annotations

from typing import Any

import numpy as np


def add_initializer(model: Any, array: np.ndarray[Any, Any], like: str) -> Any:
    """A new constant of ``model``, named after ``like``."""
    import onnx_ir as ir

    name, number = f"{like}_folded", 1
    while name in model.graph.initializers:
        number += 1
        name = f"{like}_folded_{number}"
    tensor = ir.Tensor(array, name=name)
    made = ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    model.graph.register_initializer(made)
    return made


def drop_unused(model: Any) -> None:
    """Remove nodes and constants that nothing reads, in place."""
    graph = model.graph
    for node in reversed(list(graph)):
        outputs = node.outputs
        if all(not o.uses() and not o.is_graph_output() for o in outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
