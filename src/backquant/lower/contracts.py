"""What the steps of lowering require and ensure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from backquant.graph import Breach, get_module
from backquant.graph.edit import weighted_part
from backquant.lower.kernels.boundary import dequantize, quantize
from backquant.lower.machine import EngineInfo
from backquant.lower.qdq import is_dequantize, is_quantize
from backquant.lower.rule import KernelUse, Lowered, quantizes
from backquant.nn.quantized.reference.integer_weights import IntegerWeights


@dataclass(frozen=True)
class FusedAttention:
    """``node``: the kernel. ``core``: the names of the operators that it computes, in order; ``moved``: of
    those that now move integers."""

    node: Node
    core: tuple[str, ...]
    moved: tuple[str, ...]


def reference_modules_are_lowered(
    lowered: Lowered, _: object, rules: object, engine: EngineInfo, *__: object
) -> Iterator[Breach]:
    """A reference module that is still called is one of the operators left in float, with a reason; engines
    that compute as described take some of them for kernels.
    """
    if engine.as_described:
        return
    told = {reason.node for reason in lowered.left_in_float}
    module = lowered.graph_module
    for node in module.graph.nodes:
        if node.op == "call_module" and node.name not in told:
            part = weighted_part(get_module(module, str(node.target)))
            if isinstance(part, IntegerWeights):
                what = type(part).__name__
                yield Breach(node.name, f"a kernel in the place of the reference module {what}")


def boundaries_are_folded(_: None, graph: Graph, engine: EngineInfo) -> Iterator[Breach]:
    """No value is dequantized and quantized again, or dequantized for nobody; what is left are kernels."""

    def dequantizes(node: object) -> bool:
        return is_dequantize(node) or (isinstance(node, Node) and node.target is dequantize)

    for node in graph.nodes:
        if (quantizes(node, engine) or node.target is quantize) and dequantizes(node.args[0]):
            yield Breach(node.name, "integers to stay integers, and reads a dequantize node")
        if dequantizes(node) and not node.users:
            yield Breach(node.name, "a reader of the dequantized value")
        if not engine.as_described and (is_quantize(node) or is_dequantize(node)):
            yield Breach(node.name, "a kernel in the place of the operator of the reference model")


def kernels_are_recorded(
    found: Sequence[KernelUse | None],
    module: GraphModule,
    kernels: Sequence[KernelUse | None],
    records: Mapping[Node, int],
) -> Iterator[Breach]:
    """Each kernel of the record is a node of the graph, unless it became part of another."""
    nodes: Collection[Node] = set(module.graph.nodes)
    called = {place for node, place in records.items() if node in nodes}
    for place, use in enumerate(found):
        if use is not None and place not in called:
            yield Breach("+".join(use.nodes), f"a call of its kernel {use.kernel}")


def fused_nodes_are_there(found: Sequence[FusedAttention], module: GraphModule) -> Iterator[Breach]:
    """Each kernel that was made is called, and none of the operators that it computes is."""
    nodes = {node.name: node for node in module.graph.nodes}
    for fused in found:
        if nodes.get(fused.node.name) is not fused.node:
            yield Breach(fused.node.name, "a call in the graph")
        for name in fused.core:
            if name in nodes:
                yield Breach(name, f"no call: {fused.node.name} computes it")


# One record for two kernels that were fused.


def merge_records(
    found: list[KernelUse | None], records: dict[Node, int], pair: tuple[Node, Node], kernel: str
) -> None:
    """The first node of ``pair`` now runs for both, as ``kernel``; the entry of the second in ``found``
    becomes None. ``records``: the position of each node in ``found``.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> pair = graph.placeholder("conv"), graph.placeholder("add")
    >>> uses = [KernelUse((name,), name, torch.uint8, "x86") for name in ("conv", "add")]
    >>> merge_records(uses, dict(zip(pair, (0, 1))), pair, "conv(add)")
    >>> [str(use) for use in uses]
    ['conv+add: conv(add) (uint8)', 'None']
    """
    first, second = pair
    if first not in records or second not in records:
        return
    here, there = records[first], records.pop(second)
    before, after = found[here], found[there]
    if before is not None and after is not None:
        nodes = (*before.nodes, *after.nodes)
        found[here] = dataclasses.replace(before, nodes=nodes, kernel=kernel)
        found[there] = None
