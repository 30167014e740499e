"""Additions of an epsilon and products with nearly one, kept from the exporter's optimizer.

1. It takes a number of up to 1e-8 for zero and leaves the addition out: ``log(x + 1e-15)`` became ``log(x)``,
   infinite at zero. ``Sum`` of the same two values is not touched.
2. It takes a number within 1e-5 of one for one: ``1 - x / (1 + 1e-6)`` became zero at one. A tensor with an
   axis is not touched.

Source: ONNX operator documentation, Add-14, Sub-14, Mul-14, Div-14 and Sum-13.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer

_TAKEN_FOR_ZERO = 1e-8
_TAKEN_FOR_ONE = 1.1e-5


def keep_epsilons(model: Any) -> None:
    """Apply the rules in place, to ``x + c``, ``c + x``, ``x - c``, ``x * c``, ``c * x`` and ``x / c``."""
    for node in list(model.graph):
        if node.op_type == "Add" and any(_epsilon(value) is not None for value in node.inputs):
            node.op_type = "Sum"
        elif node.op_type == "Sub":
            epsilon = _epsilon(node.inputs[1])
            if epsilon is not None:
                negative = add_initializer(model, np.negative(epsilon), f"{node.name}_epsilon")
                node.replace_input_with(1, negative)
                node.op_type = "Sum"
        elif node.op_type in ("Mul", "Div"):
            _keep_factor(model, node)


def _keep_factor(model: Any, node: Any) -> None:
    for place, value in enumerate(node.inputs):
        factor, other = _number(value), node.inputs[1 - place]
        if factor is None or (place == 0 and node.op_type == "Div"):
            continue
        has_axes = other is not None and other.shape is not None and len(other.shape) > 0
        if has_axes and 0 < abs(float(factor.item()) - 1) <= _TAKEN_FOR_ONE:
            made = add_initializer(model, factor.reshape(1), f"{node.name}_factor")
            node.replace_input_with(place, made)


def _epsilon(value: Any) -> Any:
    """The array of a float constant that is one small number, and not zero."""
    array = _number(value)
    return array if array is not None and 0 < abs(float(array.item())) <= _TAKEN_FOR_ZERO else None


def _number(value: Any) -> Any:
    """The array of a float constant that is one number."""
    import onnx_ir as ir

    constant = None if value is None else ir.convenience.get_const_tensor(value)
    if constant is None or constant.size != 1 or not constant.dtype.is_floating_point():
        return None
    return constant.numpy()
