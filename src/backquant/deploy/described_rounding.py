"""``rounding`` and ``requantization`` of a description in files: what targets can state, what they cannot.

1. Results that are rounded half to even, from sums in float: every target's quantize operator does that.
2. All else has no operator in PyTorch or ONNX: refused, naming the fields. A target may compute
   ``backquant.quantize_rounded`` and ``backquant.requantize`` itself, by a translation of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from torch import fx

from backquant.deploy.job import ExportJob
from backquant.lower.qdq import described_arithmetic, is_described_quantize, quantize_target
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

__all__ = ["state_half_even", "unstated_rounding"]

_EVERYWHERE = ("float", "half_even")


def state_half_even(module: fx.GraphModule) -> None:
    """Rule 1, in place.

    >>> import torch
    >>> from backquant.graph import register_quantized_decomposed, register_requantize
    >>> register_quantized_decomposed(); register_requantize()
    >>> graph, op = fx.Graph(), torch.ops.backquant.quantize_rounded.default
    >>> x = graph.placeholder("x")
    >>> for rounding in ("half_even", "half_up"):
    ...     _ = graph.call_function(op, (x, 0.5, 0, -128, 127, torch.int8, rounding))
    >>> module = fx.GraphModule(torch.nn.Module(), graph)
    >>> state_half_even(module)
    >>> [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    ['quantized_decomposed.quantize_per_tensor.default', 'backquant.quantize_rounded.default']
    """
    for node in module.graph.nodes:
        if is_described_quantize(node) and described_arithmetic(node) == _EVERYWHERE:
            node.target, node.args = quantize_target(), node.args[:-1]
    module.recompile()


def unstated_rounding(job: ExportJob, stating: str, own: Container[Any] = ()) -> Iterator[Reason]:
    """Rule 2: the results of ``job.module`` that neither ``stating`` nor ``own`` has an operator for."""
    for node in job.module.graph.nodes:
        if not is_described_quantize(node) or node.target in own:
            continue
        requantization, rounding = described_arithmetic(node)
        asked = [f"rounding: {rounding}"]
        if requantization != "float":
            asked.append(f"requantization: {requantization}")
        computed = next((n for n in node.all_input_nodes[:1]), node)
        decision = job.plan.decisions.get(computed.name)
        yield Reason(
            computed.name,
            ReasonCode.NO_TRANSLATION,
            asked=f"{', '.join(asked)} of {job.config.name}",
            admitted=f"{stating} rounds halves to even, and requantizes in float",
            fix="leave rounding and requantization out of the description that the file is made by;\n"
            "convert_to_integer_reference computes them",
            place="" if decision is None else decision.module_path,
        )
