"""Inputs that arrive quantized and outputs that leave quantized (PrepareCustomConfig).

1. In the ``"quantized_tensor"`` dialect they are PyTorch's quantized tensors, which carry their
   qparams.
2. In the ``"decomposed"`` dialect they are plain integer tensors. The qparams of an input are those
   that its observer measured, or that the parent of a standalone module passes; those of an output
   are its own. ``Record.inputs`` and ``.outputs`` tell them (of an output inside of a dict
   or list under ``"0.key"``).
3. An output that is computed in float stays float, and the plan notes it (PyTorch says nothing).
4. A dict counts as output 0, as in PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from backquant.convert.contracts import inputs_are_dequantized
from backquant.convert.dialects import is_dequantize
from backquant.convert.state import Conversion
from backquant.dtypes import QParams
from backquant.errors import ConfigError
from backquant.graph import contract, register_quantized_decomposed
from backquant.prepare import QUANTIZED_INPUT


@contract(ensures=[inputs_are_dequantized])
def dequantize_inputs(work: Conversion) -> set[str]:
    """Dequantize the inputs that arrive quantized; returns the sites that are gone.

    Raises ConfigError when nothing tells what the integers of an input stand for.
    """
    custom = work.prepared.custom
    inputs = [node for node in work.module.graph.nodes if node.op == "placeholder"]
    gone: set[str] = set()
    for index in dict.fromkeys(custom.input_quantized_indexes if custom is not None else ()):
        if index >= len(inputs) or (work.passed is not None and index not in work.passed):
            continue  # the parent passes it as float
        node = inputs[index]
        qparams = _input_qparams(work, index, node)
        site = f"{QUANTIZED_INPUT}{index}"
        if site in work.prepared.sites:
            observer = work.nodes[site]
            observer.replace_all_uses_with(node)
            work.editor.erase(observer)
            gone.add(site)
        insert_dequantize(work, node, qparams)
        work.inputs[index] = qparams
    return gone


def _input_qparams(work: Conversion, index: int, node: fx.Node) -> QParams | None:
    if work.dialect == "quantized_tensor":
        return None
    if work.passed is not None:
        return work.passed[index]
    site = f"{QUANTIZED_INPUT}{index}"
    if site not in work.prepared.sites:
        raise ConfigError(
            "nothing measured what the integers of a quantized input stand for",
            where=f"PrepareCustomConfig.set_input_quantized_indexes, input {node.name!r}",
            fix="prepare with prepare_fx, or convert with dialect='quantized_tensor'",
        )
    return work.qparams[site].number


def insert_dequantize(work: Conversion, node: fx.Node, qparams: QParams | None) -> fx.Node:
    """Dequantize the value of ``node`` for all who read it; ``None``: it is a quantized tensor."""
    with work.editor.graph.inserting_after(node):
        if qparams is None:
            dequantized = work.editor.graph.call_method("dequantize", (node,))
        else:
            register_quantized_decomposed()
            target = torch.ops.quantized_decomposed.dequantize_per_tensor.default
            dequantized = work.editor.graph.call_function(target, (node, *qparams.literals))
    work.editor.replace_uses(node, dequantized)
    work.editor.provenance.record(dequantized.name, (node.name,))
    return dequantized


def plain_qparams(dequantized: fx.Node) -> QParams | None:
    """What the integers below a dequantize node stand for; ``None`` if the tensor tells it.

    >>> graph = fx.Graph()
    >>> plain_qparams(graph.call_method("dequantize", (graph.placeholder("q"),))) is None
    True
    """
    if dequantized.op == "call_method":
        return None
    scale, zero_point, low, high, dtype = dequantized.args[1:6]
    return QParams(float(scale), int(zero_point), int(low), int(high), dtype)  # type: ignore[arg-type]


def keep_outputs_quantized(work: Conversion) -> None:
    """Leave out the last dequantize of the outputs that were named.

    Raises ConfigError for an index that is no output.
    """
    custom = work.prepared.custom
    if custom is None or not custom.output_quantized_indexes:
        return
    output = next(node for node in reversed(work.module.graph.nodes) if node.op == "output")
    returned = output.args[0]
    several = isinstance(returned, (list, tuple))
    entries: list[Any] = list(returned) if several else [returned]
    for index in dict.fromkeys(custom.output_quantized_indexes):
        if index >= len(entries):
            raise ConfigError(
                f"output {index} is to stay quantized, and the model has {len(entries)} outputs",
                where="PrepareCustomConfig.set_output_quantized_indexes",
                fix=f"one of {', '.join(map(str, range(len(entries))))}",
            )
        before = len(work.outputs)
        entries[index] = _quantized(work, entries[index], index)
        if len(work.outputs) == before:
            note = f"output {index} is to stay quantized, and is computed in float"
            work.plan = replace(work.plan, notes=(*work.plan.notes, note))
    output.args = (type(returned)(entries) if several else entries[0],)


def _quantized(work: Conversion, value: Any, label: int | str) -> Any:
    """``value`` below its dequantize nodes, which are noted in ``work.outputs`` by label."""
    if _is_static_dequantize(value):
        work.outputs[label] = plain_qparams(value)
        return value.args[0]
    if isinstance(value, dict):
        return {key: _quantized(work, inner, f"{label}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        entries = enumerate(value)
        return type(value)(_quantized(work, inner, f"{label}.{i}") for i, inner in entries)
    return value


def _is_static_dequantize(value: Any) -> bool:
    if not is_dequantize(value):
        return False
    static = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    return value.op == "call_method" or value.target is static
