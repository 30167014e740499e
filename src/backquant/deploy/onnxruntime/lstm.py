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
from backquant.deploy.onnx.provenance import ORIGIN
from backquant.deploy.onnx.rewrite import OnnxCalls, array_of, rewrite

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
    rewrite(
        model,
        {"LSTM": lambda n: _on_integers(n) if n.metadata_props.get(ORIGIN) in names else None},
    )


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
    numbers = list(map(array_of, node.inputs[1:]))
    if node.op_type not in ("Slice", "Unsqueeze") or any(number is None for number in numbers):
        return None
    of = _weight(node.inputs[0])
    moves = [number.tolist() for number in numbers]
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
    constants = list(map(array_of, node.inputs))
    if any(constant is None for constant in constants):
        return None
    integers, scale, *zero_points = constants
    if integers.dtype != np.int8 or integers.ndim != 2 or any(zero.any() for zero in zero_points):
        return None
    if scale.ndim == 1 and scale.size > 1 and node.attributes["axis"].as_int() % 2 != 0:
        return None
    rows = np.broadcast_to(scale.reshape(-1, 1), (len(integers), 1))
    return _Weight(integers, rows.astype(np.float32))


def _on_integers(node: Any) -> Any:
    weights = [_weight(node.inputs[place]) for place in (1, 2)]
    if None in weights:
        return None
    _read_floats(node)
    write = OnnxCalls(node)
    inputs = [*node.inputs, *[None] * _STATES][:_STATES]
    for place, weight in enumerate(weights, 1):
        assert weight is not None
        name, scale = f"{node.name}/weight_{place}", weight.scale[..., 0]
        inputs[place] = write.constant(weight.integers.transpose(0, 2, 1), name)
        zeros = np.zeros(scale.shape, np.int8)
        inputs += [write.constant(scale, f"{name}_scale"), write.constant(zeros, f"{name}_zero")]
    kept = {n: a for n, a in node.attributes.items() if n in (*_ATTRIBUTES, *_NUMBERS)}
    return write.call(_NAME, *inputs, domain=_DOMAIN, outputs=len(node.outputs), **kept)


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
