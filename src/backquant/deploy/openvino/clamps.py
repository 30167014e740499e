"""Bounds of clamps between integers: OpenVINO (2026.4) makes integers of them by cutting off, where the
description rounds. So a bound is put a quarter of a step above the integer that it rounds to."""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer

_CLAMPS = frozenset({"Clip"})
_SCALE, _ZERO_POINT = 1, 2
_BOUNDS = (1, 2)  # least, most


def shift_bounds(model: Any) -> None:
    """Give clamps that one node quantizes bounds that are cut off to the integers that they round to.

    Everything below a bound and everything in its step becomes the same integer before and after. Changes an
    ``onnx_ir.Model``.
    """
    for node in list(model.graph):
        readers = [use.node for use in node.outputs[0].uses()]
        if node.op_type not in _CLAMPS or [each.op_type for each in readers] != ["QuantizeLinear"]:
            continue
        scale, zero_point = (_constant(readers[0].inputs[at]) for at in (_SCALE, _ZERO_POINT))
        if scale is None or zero_point is None or scale.size != 1:
            continue
        for at in _BOUNDS:
            bound = _constant(node.inputs[at]) if len(node.inputs) > at else None
            if bound is not None:
                step = scale.astype(np.float64).reshape(())
                places = np.rint(bound.astype(np.float64) / step) + 0.25
                made = (places * step).astype(bound.dtype)
                node.replace_input_with(at, add_initializer(model, made, node.inputs[at].name))


def _constant(value: Any) -> Any:
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()
