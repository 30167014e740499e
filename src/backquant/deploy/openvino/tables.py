"""Tables of embeddings whose rows are scaled: the factor goes into the table.

OpenVINO (2026.4) takes ``Gather(table) * factor`` for compressed weights that are decompressed, and throws
while it folds what is quantized behind them (Speech2Text). The products are the same floats, computed once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer, drop_unused

_LARGE = 1 << 24  # elements of a table that others read, too: a copy of more is not worth it


def scale_tables(model: Any) -> None:
    """Fold factors of one number that alone read rows of a table. Changes an ``onnx_ir.Model``."""
    changed = False
    for node in list(model.graph):
        if node.op_type != "Gather" or not _is_table(node.inputs[0]):
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if len(readers) == 1 and readers[0].op_type == "Mul":
            changed |= _fold(model, node, readers[0])
    if changed:
        drop_unused(model)


def _is_table(value: Any) -> bool:
    held = None if value is None else value.const_value
    if held is None or str(held.dtype.name) != "FLOAT":
        return False
    return len(held.shape) == 2 and (len(value.uses()) == 1 or held.size <= _LARGE)


def _fold(model: Any, gather: Any, product: Any) -> bool:
    rows = gather.outputs[0]
    factor = next((value for value in product.inputs if value is not rows), None)
    if factor is None or factor.const_value is None or factor.const_value.size != 1:
        return False
    if rows.shape is None or len(factor.const_value.shape) > len(rows.shape):
        return False
    number = factor.const_value.numpy().astype(np.float32).reshape(())
    table = gather.inputs[0]
    scaled = table.const_value.numpy() * number
    gather.replace_input_with(0, add_initializer(model, scaled, f"{table.name}/scaled"))
    product.outputs[0].replace_all_uses_with(rows, replace_graph_outputs=True)
    model.graph.remove(product, safe=True)
    return True
