"""Additions of an epsilon, kept from the exporter's optimizer.

It takes a number of up to 1e-8 for zero and leaves the addition out: ``log(x + 1e-15)`` became ``log(x)``,
infinite at zero. ``Sum`` of the same two values is not touched.

Source: ONNX operator documentation, Add-14, Sub-14 and Sum-13.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer

_TAKEN_FOR_ZERO = 1e-8


def keep_epsilons(model: Any) -> None:
    """Write ``x + c``, ``c + x`` and ``x - c`` of a number that small as ``Sum``, in place."""
    for node in list(model.graph):
        if node.op_type == "Add" and any(_epsilon(value) is not None for value in node.inputs):
            node.op_type = "Sum"
        elif node.op_type == "Sub":
            epsilon = _epsilon(node.inputs[1])
            if epsilon is not None:
                negative = add_initializer(model, np.negative(epsilon), f"{node.name}_epsilon")
                node.replace_input_with(1, negative)
                node.op_type = "Sum"


def _epsilon(value: Any) -> Any:
    """The array of a float constant that is one small number, and not zero."""
    import onnx_ir as ir

    constant = None if value is None else ir.convenience.get_const_tensor(value)
    if constant is None or constant.size != 1 or not constant.dtype.is_floating_point():
        return None
    array = constant.numpy()
    return array if 0 < abs(float(array.item())) <= _TAKEN_FOR_ZERO else None
