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


def replace_node(model: Any, node: Any, made: Any, word: str) -> None:
    """``made`` in the place of ``node``; its result is named after that of ``node``, and ``word``."""
    made.metadata_props.update(node.metadata_props)
    old, new = node.outputs[0], made.outputs[0]
    new.name, new.type, new.shape = f"{old.name}_{word}", old.type, old.shape
    model.graph.insert_before(node, made)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


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
