"""Fourier transforms as OpenVINO (2026.4) reads them right.

1. It takes the axis of an ONNX ``DFT`` from the attribute of opsets before 20 only. From 20 on, where the
   axis is an input, it transforms axis 1, in silence. So others change places with that one.
2. One-sided transforms of real values get an axis too many. Two-sided ones are cut.
3. One-sided inverse transforms lose an axis. Two-sided ones, of values padded with zeros, have the same real
   part where all but the first, and of an even number the middle one, are doubled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.rewrite import OnnxCalls, array_of, input_of, rewrite

_SINCE = 20  # the opset in which the axis is an input
_LENGTH, _AXIS = 1, 2  # the inputs


def plain_transforms(model: Any) -> None:
    """Write them so. Changes an ``onnx_ir.Model``."""
    rewrite(model, {"DFT": _plain})


def _plain(node: Any) -> Any:
    axis, value = _axis(node), node.inputs[0]
    if axis is None:
        return None
    write = OnnxCalls(node)
    is_inverse, factors = node.attributes.get_int("inverse", 0), _factors(node, axis)
    if not node.attributes.get_int("onesided", 0) or (is_inverse and factors is None):
        is_read = input_of(node, _AXIS) is None or axis == 1
        return None if is_read else _transformed(write, value, axis)
    if not is_inverse:  # rule 2: of n values the first n // 2 + 1
        whole = _transformed(write, value, axis, onesided=0)
        size = write.Shape(whole, start=axis, end=axis + 1)
        half = write.Div(size, write.constant([2]))
        end = write.Add(half, write.constant([1]))
        return write.Slice(whole, write.constant([0]), end, write.constant([axis]))
    scaled = write.Mul(value, write.constant(factors))
    scaled.shape = value.shape
    real = _transformed(write, scaled, axis, onesided=0)
    return write.Slice(real, write.constant([0]), write.constant([1]), write.constant([-1]))


def _axis(node: Any) -> int | None:
    """The axis that is transformed, from the front; none where it is not known."""
    shape = node.inputs[0].shape
    if node.graph.opset_imports[""] < _SINCE:
        return int(node.attributes.get_int("axis", 1))
    given = input_of(node, _AXIS)
    if shape is None or (given is not None and given.const_value is None):
        return None
    return (-2 if given is None else int(array_of(given))) % len(shape)


def _factors(node: Any, axis: int) -> Any:
    """Rule 3, where the lengths are known."""
    shape, length = node.inputs[0].shape, array_of(input_of(node, _LENGTH))
    if shape is None or not isinstance(shape[axis], int) or length is None:
        return None
    if shape[axis] != int(length) // 2 + 1:
        return None
    factors = np.full(shape[axis], 2, np.float32)
    factors[0] = 1
    if int(length) % 2 == 0:
        factors[-1] = 1
    return factors.reshape(-1, *[1] * (len(shape) - axis - 1))


def _transformed(write: OnnxCalls, value: Any, axis: int, **attributes: int) -> Any:
    """The transform of ``value``: by rule 1."""
    _, length, given = (input_of(write.node, place) for place in range(3))
    if given is None or axis == 1:
        return write.again(value, *write.node.inputs[1:], **attributes)
    order = list(range(len(value.shape)))
    order[1], order[axis] = axis, 1
    made = write.again(write.Transpose(value, perm=order), length, write.constant(1), **attributes)
    return write.Transpose(made, perm=order)
