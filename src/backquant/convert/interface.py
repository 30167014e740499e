"""Inputs that arrive quantized and outputs that leave quantized (PrepareCustomConfig)."""

from __future__ import annotations

from typing import Any

from torch import fx

from backquant.convert.dialects import is_dequantize
from backquant.convert.state import Conversion
from backquant.errors import ConfigError

__all__ = ["dequantize_inputs", "keep_outputs_quantized"]


def dequantize_inputs(work: Conversion) -> None:
    """Dequantize the inputs that arrive quantized.

    Raises ConfigError for quantized inputs in the decomposed dialect: a plain integer tensor does not
    tell its scale.
    """
    custom = work.prepared.custom
    if custom is None:
        return
    inputs = [node for node in work.module.graph.nodes if node.op == "placeholder"]
    for index in custom.input_quantized_indexes:
        if index < len(inputs):
            _dequantize_input(work, inputs[index])


def keep_outputs_quantized(work: Conversion) -> None:
    """Leave out the last dequantize of the outputs that were named."""
    custom = work.prepared.custom
    if custom is not None and custom.output_quantized_indexes:
        output = next(node for node in reversed(work.module.graph.nodes) if node.op == "output")
        _keep_quantized(output, list(custom.output_quantized_indexes))


def _dequantize_input(work: Conversion, node: fx.Node) -> None:
    if work.dialect != "quantized_tensor":
        raise ConfigError(
            "quantized inputs need quantized tensors: a plain integer tensor has no scale",
            where=f"PrepareCustomConfig.set_input_quantized_indexes, input {node.name!r}",
            fix='convert with dialect="quantized_tensor", or leave the input in float',
        )
    with work.editor.graph.inserting_after(node):
        dequantized = work.editor.graph.call_method("dequantize", (node,))
    work.editor.replace_uses(node, dequantized)
    work.editor.provenance.record(dequantized.name, (node.name,))


def _keep_quantized(output: fx.Node, indexes: list[int]) -> None:
    """Indexes count the entries of a list or tuple; a single tensor or a dict is number 0."""
    returned = output.args[0]
    if isinstance(returned, (list, tuple)):
        picked = {id(returned[i]) for i in indexes if i < len(returned)}
        entries = [_quantized(e) if id(e) in picked else e for e in returned]
        output.args = (type(returned)(entries),)
    elif 0 in indexes:
        output.args = (_quantized(returned),)


def _quantized(value: Any) -> Any:
    if is_dequantize(value):
        return value.args[0]
    if isinstance(value, dict):
        return {key: _quantized(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_quantized(inner) for inner in value)
    return value
