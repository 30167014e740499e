"""The operators that a lowering left in float, with the reasons.

1. A node that rules refused: their reasons.
2. A node that reads quantized values and has no rule: ``no-kernel``.
3. A node that reads float values only: ``float-in-reference``; the plan says why.
4. Arithmetic on sizes is no tensor operator and is not listed, nor is taking apart the tuple that a
   recurrent layer gives.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from backquant.graph import get_module
from backquant.graph.folding import is_random
from backquant.lower.boundaries import is_boundary
from backquant.lower.dynamic import is_dynamic_boundary
from backquant.lower.engine_info import EngineInfo
from backquant.lower.qdq import is_weight_dequantize
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode


class FloatFallback:
    """Collects, while the pass runs, what was made and what was refused."""

    def __init__(self, engine: EngineInfo) -> None:
        self.engine = engine
        self._made: set[Node] = set()
        self._refused: dict[Node, list[Reason]] = {}

    def made(self, node: Node) -> None:
        """``node`` was inserted by a rule."""
        self._made.add(node)

    def note(self, node: Node, reasons: list[Reason]) -> None:
        """No rule lowered ``node``; ``reasons`` are those of the rules that were tried."""
        if node in self._made:
            return
        quantized = (is_boundary(n) or is_dynamic_boundary(n) for n in node.all_input_nodes)
        if not reasons and any(quantized):
            reasons = [self._no_kernel(node)]
        self._refused[node] = list(dict.fromkeys(reasons))

    def _no_kernel(self, node: Node) -> Reason:
        return Reason(
            node.name,
            ReasonCode.NO_KERNEL,
            f"an integer kernel for {_spelling(node)}",
            f"engine {self.engine.name} has none",
            place=f"engine {self.engine.name}",
        )

    def reasons(self, graph_module: GraphModule) -> tuple[Reason, ...]:
        """One reason or more for each operator that computes in float, in graph order."""
        found: list[Reason] = []
        sizes: set[Node] = set()
        for node in graph_module.graph.nodes:
            if not node.op.startswith("call_") or node in self._made or is_boundary(node):
                if node in self._made and _reads_size(node):
                    sizes.add(node)
                continue
            if is_weight_dequantize(node) or is_dynamic_boundary(node):
                continue
            if _is_part_of_tuple(graph_module, node):
                continue
            if _reads_size(node) or (_may_be_size(node) and sizes.issuperset(node.all_input_nodes)):
                sizes.add(node)
                continue
            found += self._refused.get(node) or [self.float_in_reference(node)]
        return tuple(found)

    def float_in_reference(self, node: Node) -> Reason:
        """Rule 3, and operators that the mapping leaves in float between quantized ones."""
        return Reason(
            node.name,
            ReasonCode.FLOAT_IN_REFERENCE,
            f"an integer kernel for {_spelling(node)}",
            "integer inputs: the reference model computes it on float values, see the plan",
            place=f"engine {self.engine.name}",
        )


def _is_part_of_tuple(graph_module: GraphModule, node: Node) -> bool:
    source: Any = node
    while isinstance(source, Node) and source.target is operator.getitem:
        source = source.args[0]
    if source is node or not isinstance(source, Node) or source.op != "call_module":
        return False
    module = get_module(graph_module, str(source.target))
    return isinstance(module, (nn.RNNBase, nn.RNNCellBase))


def _reads_size(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "ndimension", "stride")
    return node.target is getattr or node.target is len


def _may_be_size(node: Node) -> bool:
    """Whether the value may be a size: not that of a module, nor random numbers, which are tensors."""
    is_random_function = is_random(getattr(node.target, "__name__", ""))
    return bool(node.all_input_nodes) and node.op != "call_module" and not is_random_function


def _spelling(node: Node) -> str:
    target: Any = node.target
    if node.op == "call_module":
        return f"module {target}"
    if node.op == "call_method":
        return f".{target}()"
    return str(getattr(target, "__name__", target))
