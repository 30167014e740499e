"""Sums of 16 bits: without VNNI, x86 adds two products of 8 bits in 16, which overflow. Results are other
ones then, as they are where a runtime has rewritten a model wrong. A model whose integers are half as large
tells the two apart: 255 * 64 * 2 fits into 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx, nn

from backquant.deploy.job import ExportJob
from backquant.graph import copied_graph, shallow_copy
from backquant.lower.machine import machine_facts
from backquant.lower.qdq import is_channel_dequantize, is_dequantize, is_quantize, qparams_of
from backquant.nn.quantized.reference.integer_weights import IntegerWeights

_EIGHT_BITS = (torch.int8, torch.uint8)
_SEVEN = 127  # the difference between the largest and the smallest integer of 7 bits


def overflows_here() -> bool:
    """Whether this CPU adds products so."""
    facts = machine_facts()
    return facts.is_x86 and not facts.has_vnni


def halved(job: ExportJob) -> ExportJob:
    """``job`` with weights and activations of half as many integers, and steps twice as large.

    Operators, shapes and zero points other than 0 stay, so that a runtime rewrites it alike. Weights of fewer
    bits, integers at the edges of the model and what is measured at each call stay as they are.
    """
    module = fx.GraphModule(shallow_copy(job.module), copied_graph(job.module.graph))
    for part in module.modules():
        for name in part.weight_names if isinstance(part, IntegerWeights) else ():
            if _is_wide(vars(part)[f"{name}_quant_min"], vars(part)[f"{name}_quant_max"]):
                _halve(part, name, f"{name}_scale", f"{name}_zero_point")
    weights: dict[tuple[str, ...], None] = {}
    for node in module.graph.nodes:
        if is_quantize(node) and all(map(is_dequantize, node.users)):
            for each in (node, *node.users):
                _halve_literals(each)
        elif is_channel_dequantize(node) and _is_wide(*node.args[4:6]):
            weights[tuple(str(held.target) for held in node.args[:3])] = None
        elif is_dequantize(node) and node.args[0].op == "get_attr":
            weights[(str(node.args[0].target),)] = None
            _halve_literals(node)
    for names in weights:
        _halve(module, *names)
    module.recompile()
    return replace(job, module=module)


def _is_wide(low: int, high: int) -> bool:
    return _SEVEN < high - low <= 2 * _SEVEN + 1


def _halve(owner: nn.Module, *names: str) -> None:
    """The integers that ``owner`` has under a name; and their scale and zero point, of weights by channel."""
    weight, *qparams = (owner.get_buffer(name) for name in names)
    if weight.dtype not in _EIGHT_BITS or any(q.is_floating_point() for q in qparams[1:]):
        return
    made = [weight // 2, *(q * 2 if q.is_floating_point() else q // 2 for q in qparams)]
    for name, value in zip(names, made, strict=True):
        path, _, last = name.rpartition(".")
        owner.get_submodule(path)._buffers[last] = value


def _halve_literals(node: fx.Node) -> None:
    qparams = qparams_of(node)
    if _is_wide(qparams.quant_min, qparams.quant_max):
        zero_point = (qparams.zero_point + (qparams.zero_point > 0)) // 2
        node.args = (node.args[0], 2 * qparams.scale, zero_point, *node.args[3:])
