"""``rounding`` and ``requantization`` of a description in exported files, where the format can express them.

1. Results that are rounded half to even, from sums in float: every target's quantize operator does that.
2. All else has no operator in PyTorch or ONNX. ``qdq-onnx`` and ``pt2e`` compute it from operators that there
   are, or, as ``STANDARD`` asks, leave it to the hardware (3). Runtimes have kernels of their own arithmetic:
   refused, naming the fields, but where a translation of one's own computes ``backquant.quantize_rounded``
   and ``backquant.requantize``.
3. A quantize operator as it is, whose file says by its side how the hardware rounds.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from backquant.deploy.job import ExportJob
from backquant.lower.qdq import described_arithmetic, is_described_quantize, quantize_target
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

__all__ = [
    "STANDARD",
    "arithmetic_words",
    "described_quantizes",
    "state_half_even",
    "unstated_rounding",
    "with_standard_quantize",
]

#: The option of rule 3.
STANDARD = "standard_quantize"
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


def described_quantizes(job: ExportJob) -> dict[str, fx.Node]:
    """The quantize nodes of ``job.module`` that rule 2 is about, by name."""
    return {node.name: node for node in job.module.graph.nodes if is_described_quantize(node)}


def arithmetic_words(made_for: fx.Node) -> dict[str, str]:
    """The attributes written beside a quantize operator that only the hardware computes as described.

    ``fixed_point_twice`` rounds as it does, whatever ``rounding`` says.
    """
    requantization, rounding = described_arithmetic(made_for)
    words = {"requantization": requantization}
    return words if requantization == "fixed_point_twice" else {**words, "rounding": rounding}


def with_standard_quantize(job: ExportJob) -> ExportJob:
    """Rule 3: ``job`` with a copy of its module."""
    graph = fx.Graph()
    copied = graph.graph_copy(job.module.graph, {})
    graph.output(copied)
    for node in list(graph.nodes):
        if not is_described_quantize(node):
            continue
        value, *others = node.args
        unit = None
        if described_arithmetic(node)[0] != "float":
            unit, _, *others = others[:-1]  # the step of the sums, and its axis
        node.target, node.args = quantize_target(), (value, *others[:-1])
        if isinstance(unit, fx.Node) and not unit.users:
            graph.erase_node(unit)
    return replace(job, module=fx.GraphModule(job.module, graph))  # with what the graph reads


def unstated_rounding(
    job: ExportJob,
    stating: str,
    own: Container[Any] = (),
    arithmetic: Container[tuple[str, str]] = (),
) -> Iterator[Reason]:
    """Rule 2: the results of ``job.module`` that neither ``stating`` nor ``own`` has an operator for;
    ``arithmetic``: what the target's own kernels compute."""
    for node in job.module.graph.nodes:
        if not is_described_quantize(node) or node.target in own:
            continue
        if described_arithmetic(node) in arithmetic:
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
            fix="the targets qdq-onnx and pt2e, which compute it; or leave rounding and requantization\n"
            "out of the description that the file is made by",
            place="" if decision is None else decision.module_path,
        )
