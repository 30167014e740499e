"""Bicubic resizing to a known size, as one product with a matrix along the columns and one along the rows.

ONNX Runtime (1.31) computes a bicubic ``Resize`` value by value: of CrossViT, which resizes its input, two
thirds of the time. The matrices are what PyTorch's operator makes of unit ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from backquant.deploy.onnx.initializers import add_initializer, drop_unused, replace_node
from backquant.operators import overload

_SIZES = 3  # the input
_MOST = 4096  # rows and columns: beyond, the products are more work than they save
_MODES = {"half_pixel": False, "align_corners": True}
_CUBIC = -0.75


def resize_by_products(model: Any) -> None:
    """Write such resizing so. Changes an ``onnx_ir.Model``."""
    found = [node for node in model.graph if node.op_type == "Resize" and _is_bicubic(node)]
    for node in found:
        _write(model, node)
    if found:
        drop_unused(model)


def _is_bicubic(node: Any) -> bool:
    named = {name: each.value for name, each in node.attributes.items()}
    if named.get("mode") != "cubic" or named.get("cubic_coeff_a", _CUBIC) != _CUBIC:
        return False
    if named.get("coordinate_transformation_mode", "half_pixel") not in _MODES or "axes" in named:
        return False
    return not named.get("antialias") and not named.get("exclude_outside")


def _write(model: Any, node: Any) -> None:
    import onnx_ir as ir

    source, rest = node.inputs[0], list(node.inputs[1:])
    shape, sizes = source.shape, rest[_SIZES - 1] if len(rest) == _SIZES else None
    if sizes is None or sizes.const_value is None or any(each is not None for each in rest[:2]):
        return
    if shape is None or len(shape) != 4 or not all(isinstance(size, int) for size in shape):
        return
    old, new = [int(size) for size in shape], sizes.const_value.numpy().tolist()
    if old[:2] != new[:2] or sum(old[2:]) > _MOST or source.dtype != ir.DataType.FLOAT:
        return
    mode = node.attributes.get("coordinate_transformation_mode")
    corners = _MODES["half_pixel" if mode is None else mode.as_string()]
    columns = _constant(model, node, _matrix(old[3], new[3], corners).T)
    rows = _constant(model, node, _matrix(old[2], new[2], corners))
    first = ir.Node("", "MatMul", [source, columns], name=f"{node.name}/columns")
    first.outputs[0].name, first.outputs[0].type = first.name, source.type
    first.outputs[0].shape = ir.Shape([*old[:3], new[3]])
    model.graph.insert_before(node, first)
    second = ir.Node("", "MatMul", [rows, first.outputs[0]], name=f"{node.name}/rows")
    replace_node(model, node, second, "resized")


def _constant(model: Any, node: Any, matrix: np.ndarray[Any, Any]) -> Any:
    return add_initializer(model, np.ascontiguousarray(matrix), f"{node.name}/matrix")


def _matrix(old: int, new: int, corners: bool) -> np.ndarray[Any, Any]:
    """What makes ``new`` values of ``old`` ones: ``[new, old]``.

    >>> _matrix(2, 2, corners=False).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    made = overload("upsample_bicubic2d")(torch.eye(old)[None, None], [new, old], corners)
    matrix: np.ndarray[Any, Any] = made[0, 0].numpy()
    return matrix
