"""What clips values before a QuantizeLinear, clips the integers behind it instead.

ONNX Runtime runs a product on integers where a QuantizeLinear reads it. A Relu or Clip between the two it
takes away only where it knows that the quantization does the same: not behind a reshape, and not where the
quantized range is wider than the bounds (6.03 over the 6 of a ReLU6); the product then runs in float.
Rounding keeps the order of values, so that clipping to what the bounds become as integers, after the
quantization, gives the same integers; where these are the ends of the integer type nothing is left to clip.
Between a dequantize and a quantize node of one grid the integers themselves are clipped: ONNX Runtime has no
Relu of integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer, drop_unused
from backquant.deploy.onnxruntime.grids import has_one_scale, same_grid

_INFINITY = float("inf")


def clip_integers(model: Any) -> None:
    """Rewrite, in place, every Relu and Clip with constant bounds that only a QuantizeLinear reads."""
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear" and has_one_scale(node):
            source, low, high = _unclipped(node.inputs[0])
            producer = source.producer()
            if source is node.inputs[0] or producer is None:
                continue
            if producer.op_type != "DequantizeLinear":
                _move(model, node, source, (low, high))
            elif same_grid(producer, node):
                _clip(model, node, producer.inputs[0], (low, high))
    drop_unused(model)


def _unclipped(value: Any) -> tuple[Any, float, float]:
    """What is clipped before ``value``, by nodes that nothing else reads, and the bounds of all together."""
    low, high = -_INFINITY, _INFINITY
    while (bounds := _bounds(value)) is not None:
        low, high = max(low, bounds[0]), min(high, max(low, bounds[1]))
        value = value.producer().inputs[0]
    return value, low, high


def _bounds(value: Any) -> tuple[float, float] | None:
    node = value.producer()
    if node is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    if node.op_type == "Relu":
        return 0.0, _INFINITY
    if node.op_type != "Clip":
        return None
    given = [*node.inputs[1:], None, None][:2]
    if any(bound is not None and bound.const_value is None for bound in given):
        return None
    low, high = (None if b is None else float(b.const_value.numpy()) for b in given)
    return (-_INFINITY if low is None else low), (_INFINITY if high is None else high)


def _move(model: Any, node: Any, source: Any, bounds: tuple[float, float]) -> None:
    """The quantization reads ``source``, and its result is clipped where there is anything to clip."""
    node.replace_input_with(0, source)
    low, high, ends = _steps(node, bounds)
    if (low, high) != ends:
        clipped = _clip(model, node, node.outputs[0], bounds)
        clipped.replace_input_with(0, node.outputs[0])


def _clip(model: Any, node: Any, integers: Any, bounds: tuple[float, float]) -> Any:
    """A Clip of ``integers``, which takes the place of what ``node`` gives."""
    import onnx_ir as ir

    low, high, _ = _steps(node, bounds)
    result = node.outputs[0]
    limits = [add_initializer(model, np.array(end), f"{result.name}_bound") for end in (low, high)]
    made = ir.Node("", "Clip", [integers, *limits], name=f"{node.name}/Clip")
    clipped = made.outputs[0]
    clipped.name, clipped.type, clipped.shape = f"{result.name}_clipped", result.type, result.shape
    made.metadata_props.update(node.metadata_props)
    result.replace_all_uses_with(clipped, replace_graph_outputs=True)
    model.graph.insert_after(node, made)
    return made


def _steps(node: Any, bounds: tuple[float, float]) -> tuple[Any, Any, tuple[int, int]]:
    """The bounds as integers of a QuantizeLinear, and the ends of its type."""
    scale, zero = (value.const_value.numpy() for value in node.inputs[1:])
    ends = np.iinfo(zero.dtype)
    steps = np.rint(np.array(bounds, np.float32) / scale.astype(np.float32).reshape(()))
    low, high = np.clip(steps + int(zero.reshape(())), ends.min, ends.max).astype(zero.dtype)
    return low, high, (int(ends.min), int(ends.max))
