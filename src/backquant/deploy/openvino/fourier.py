"""Fourier transforms as OpenVINO (2026.4) reads them right.

1. It takes the axis of an ONNX ``DFT`` from the attribute of opsets before 20 only. From 20 on, where the
   axis is an input, it transforms axis 1, in silence. So others change places with that one.
2. One-sided transforms of real values get an axis too many. Two-sided ones are cut.
3. One-sided inverse transforms lose an axis. Two-sided ones, of values padded with zeros, have the same real
   part where all but the first, and of an even number the middle one, are doubled.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer

_SINCE = 20  # the opset in which the axis is an input
_LENGTH, _AXIS = 1, 2  # the inputs


def plain_transforms(model: Any) -> None:
    """Write them so. Changes an ``onnx_ir.Model``."""
    for node in list(model.graph):
        if node.op_type != "DFT" or node.domain:
            continue
        axis = _axis(node, model.graph.opset_imports[""])
        if axis is None:
            continue
        if _is(node, "onesided"):
            (_take_real_part if _is(node, "inverse") else _cut_behind)(model, node, axis)
        if len(node.inputs) > _AXIS and axis != 1:
            _swap_axes(model, node, axis)


def _axis(node: Any, opset: int) -> int | None:
    """The axis that is transformed, from the front; none where it is not known."""
    shape = node.inputs[0].shape
    if opset < _SINCE:
        return int(node.attributes["axis"].as_int()) if "axis" in node.attributes else 1
    given = node.inputs[_AXIS] if len(node.inputs) > _AXIS else None
    if shape is None or (given is not None and given.const_value is None):
        return None
    axis = -2 if given is None else int(given.const_value.numpy())
    return axis % len(shape)


def _is(node: Any, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def _cut_behind(model: Any, node: Any, axis: int) -> None:
    """Rule 2: of n values the first n // 2 + 1."""
    import onnx_ir as ir

    node.attributes["onesided"] = ir.AttrInt64("onesided", 0)
    whole = node.outputs[0]
    number = partial(_constant, model, node)
    size = _made("Shape", node, whole, start=axis, end=axis + 1)
    half = _made("Div", node, size.outputs[0], number(2))
    end = _made("Add", node, half.outputs[0], number(1))
    part = _made("Slice", node, whole, number(0), end.outputs[0], number(axis))
    _put_behind(model, node, [size, half, end, part])


def _take_real_part(model: Any, node: Any, axis: int) -> None:
    """Rule 3, where the lengths are known."""
    import onnx_ir as ir

    shape = node.inputs[0].shape
    given = node.inputs[_LENGTH] if len(node.inputs) > _LENGTH else None
    if shape is None or not isinstance(shape[axis], int):
        return
    if given is None or given.const_value is None:
        return
    size, length = int(shape[axis]), int(given.const_value.numpy())
    if size != length // 2 + 1:
        return
    factors = np.full(size, 2, np.float32)
    factors[0] = 1
    if length % 2 == 0:
        factors[-1] = 1
    rest = [1] * (len(shape) - axis - 1)
    doubled = add_initializer(model, factors.reshape(-1, *rest), f"{node.name}/factors")
    scaled = _made("Mul", node, node.inputs[0], doubled)
    scaled.outputs[0].type, scaled.outputs[0].shape = node.inputs[0].type, shape
    model.graph.insert_before(node, scaled)
    node.replace_input_with(0, scaled.outputs[0])
    node.attributes["onesided"] = ir.AttrInt64("onesided", 0)
    number = partial(_constant, model, node)
    real = _made("Slice", node, node.outputs[0], number(0), number(1), number(-1))
    _put_behind(model, node, [real])


def _swap_axes(model: Any, node: Any, axis: int) -> None:
    """Rule 1."""
    order = list(range(len(node.inputs[0].shape)))
    order[1], order[axis] = axis, 1
    ahead = _made("Transpose", node, node.inputs[0], perm=order)
    ahead.name = ahead.outputs[0].name = f"{ahead.name}/ahead"
    model.graph.insert_before(node, ahead)
    node.replace_input_with(0, ahead.outputs[0])
    node.replace_input_with(_AXIS, add_initializer(model, np.array(1), f"{node.name}/axis"))
    _put_behind(model, node, [_made("Transpose", node, node.outputs[0], perm=order)])


def _made(kind: str, node: Any, *inputs: Any, **attributes: int | list[int]) -> Any:
    import onnx_ir as ir

    given = [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
    made = ir.Node("", kind, inputs, given, name=f"{node.name}/{kind}")
    made.outputs[0].name = made.name
    return made


def _constant(model: Any, node: Any, number: int) -> Any:
    return add_initializer(model, np.array([number]), f"{node.name}/number")


def _put_behind(model: Any, node: Any, nodes: list[Any]) -> None:
    """``nodes`` after ``node``; readers of its result read that of the last one, which has its name."""
    value, last = node.outputs[0], nodes[-1].outputs[0]
    for use in list(value.uses()):
        if use.node not in nodes:
            use.node.replace_input_with(use.idx, last)
    outputs = model.graph.outputs
    for place, output in enumerate(outputs):
        if output is value:
            outputs[place] = last
    last.type, last.shape = value.type, value.shape
    value.shape = None
    value.name, last.name = last.name, value.name
    model.graph.insert_after(node, nodes)
