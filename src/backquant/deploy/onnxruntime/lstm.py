"""``nn.LSTM`` on integers: the float ``LSTM`` of the file becomes ``DynamicQuantizeLSTM``.

The exporter writes the weights as Unsqueeze and Concat of Slices of ``DequantizeLinear(constant)``, in the
order of ONNX (gates i, o, f, c) and for all directions. The same moves are made here with the integers and
their scales. The operator quantizes what it reads itself, at each call the sequence and at each step the
hidden state, so that it is given the floats in front of the quantize nodes.

Source: ONNX Runtime's documentation of contrib operators (``com.microsoft``), DynamicQuantizeLSTM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from backquant.deploy.job import ExportJob
from backquant.deploy.onnx.dynamic import quantized_by
from backquant.deploy.onnx.initializers import add_initializer, drop_unused
from backquant.deploy.onnx.provenance import ORIGIN

_DOMAIN = "com.microsoft"
_NAME = "DynamicQuantizeLSTM"
_LAYOUT = ("Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# of LSTM's attributes those that the operator has, too
_ATTRIBUTES = ("activation_alpha", "activation_beta", "activations", "clip", "direction")
_NUMBERS = ("hidden_size", "input_forget")
_STATES = 8  # inputs up to the peepholes; behind them stand scales and zero points


@dataclass(frozen=True)
class _Weight:
    """Symmetric integers, and scales of the same shape but for a last axis of 1."""

    integers: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any]


def use_lstm_kernels(model: Any, job: ExportJob) -> None:
    """Rewrite, in place, every LSTM that the plan quantizes at each call, and whose weights are integers."""
    names = {name for operator in job.expected if operator.is_dynamic for name in operator.nodes}
    changed = False
    for node in list(model.graph):
        if node.op_type == "LSTM" and node.metadata_props.get(ORIGIN) in names:
            weights = [_weight(node.inputs[place]) for place in (1, 2)]
            if None not in weights:
                _rewrite(model, node, weights)
                changed = True
    if changed:
        model.opset_imports[_DOMAIN] = 1
        drop_unused(model)


def _weight(value: Any) -> _Weight | None:
    """The constant that ``value`` is made of by moves of rows; ``None`` where it is none."""
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "DequantizeLinear":
        return _constant(node)
    if node.op_type == "Concat" and node.attributes["axis"].as_int() == 0:
        parts = [_weight(part) for part in node.inputs]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        joined = (np.concatenate([getattr(p, n) for p in found]) for n in ("integers", "scale"))
        return _Weight(*joined)
    numbers = [given.const_value for given in node.inputs[1:]]
    if node.op_type not in ("Slice", "Unsqueeze") or any(number is None for number in numbers):
        return None
    of = _weight(node.inputs[0])
    moves = [number.numpy().tolist() for number in numbers]
    if of is None or not (moves == [[0]] if node.op_type == "Unsqueeze" else _of_rows(moves)):
        return None
    if node.op_type == "Unsqueeze":
        return _Weight(of.integers[None], of.scale[None])
    rows = slice(moves[0][0], moves[1][0])
    return _Weight(of.integers[rows], of.scale[rows])


def _of_rows(moves: list[list[int]]) -> bool:
    """Whether starts, ends, axes and steps are a slice of the first axis, row by row."""
    starts, ends, axes, steps = (*moves, *([0], [1])[len(moves) - 2 :])
    return len(starts) == len(ends) == 1 and axes == [0] and steps == [1]


def _constant(node: Any) -> _Weight | None:
    constants = [given.const_value for given in node.inputs]
    if any(constant is None for constant in constants):
        return None
    integers, scale, *zero_points = (constant.numpy() for constant in constants)
    if integers.dtype != np.int8 or integers.ndim != 2 or any(zero.any() for zero in zero_points):
        return None
    if scale.ndim == 1 and scale.size > 1 and node.attributes["axis"].as_int() % 2 != 0:
        return None
    rows = np.broadcast_to(scale.reshape(-1, 1), (len(integers), 1))
    return _Weight(integers, rows.astype(np.float32))


def _rewrite(model: Any, old: Any, weights: list[Any]) -> None:
    import onnx_ir as ir

    _read_floats(old)
    inputs = [*old.inputs, *[None] * _STATES][:_STATES]
    for place, weight in enumerate(weights, 1):
        name = f"{old.name}/weight_{place}"
        turned = np.ascontiguousarray(weight.integers.transpose(0, 2, 1))
        scale = np.ascontiguousarray(weight.scale[..., 0])
        inputs[place] = add_initializer(model, turned, name)
        inputs += [
            add_initializer(model, scale, f"{name}_scale"),
            add_initializer(model, np.zeros(scale.shape, np.int8), f"{name}_zero_point"),
        ]
    attributes = [old.attributes[n] for n in (*_ATTRIBUTES, *_NUMBERS) if n in old.attributes]
    made = ir.Node(_DOMAIN, _NAME, inputs, attributes, num_outputs=len(old.outputs))
    made.name = f"{old.name}/{_NAME}"
    made.metadata_props.update(old.metadata_props)
    model.graph.insert_before(old, made)
    for before, after in zip(old.outputs, made.outputs, strict=True):
        after.name = f"{before.name}_int8" if before.name else ""
        after.type, after.shape = before.type, before.shape
        before.replace_all_uses_with(after, replace_graph_outputs=True)
    model.graph.remove(old, safe=True)


def _read_floats(node: Any) -> None:
    """What the node reads is no longer quantized in front of it, where it was at each call.

    Nodes that change the layout may stand between, if nothing else reads what they give.
    """
    reader = node
    value = node.inputs[0]
    while quantized_by(value) is None:
        above = value.producer()
        alone = len(value.uses()) == 1 and not value.is_graph_output()
        if above is None or above.op_type not in _LAYOUT or not alone:
            return
        reader, value = above, above.inputs[0]
    reader.replace_input_with(0, quantized_by(value).inputs[0])
