"""Results that stay float because only float operators read them.

PyTorch quantizes the output of every quantized operator. Where a residual addition or an attention in
float reads it, that costs accuracy and a conversion, and saves nothing: the integer kernels of convolutions
and linear layers give floats as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx

from backquant.convert.dialects import is_dequantize
from backquant.convert.state import reference_state
from backquant.graph import GraphIndex, operator_key
from backquant.operators.index import find, find_root

__all__ = ["keep_results_float"]


def keep_results_float(reference: fx.GraphModule) -> None:
    """Leave out quantize and dequantize nodes behind weighted operators that only float operators read.

    What only moves values between the two (``view``, ``transpose``) moves floats then. Edits a reference
    model in the decomposed dialect in place; a note in its plan says how many results there are.
    """
    count = _Results(reference).run()
    if count:
        state = reference_state(reference)
        note = f"{count} results of convolutions and linear layers are float: only float operators read them"
        plan = replace(state.plan, notes=(*state.plan.notes, note))
        reference.meta["backquant"] = replace(state, plan=plan)


class _Results:
    def __init__(self, reference: fx.GraphModule) -> None:
        self._module = reference
        self._modules = GraphIndex(reference).modules
        self._decisions = reference_state(reference).plan.decisions
        self._floats: set[fx.Node] = set()

    def run(self) -> int:
        count = 0
        for node in reversed(list(self._module.graph.nodes)):
            if not _is_quantize(node) or not self._is_read_in_float(node):
                continue
            producer = node.args[0]
            assert isinstance(producer, fx.Node)
            moves = self._moves(producer)
            if len(producer.users) > 1 or not (moves or self._is_weighted(producer)):
                continue
            for dequantize in list(node.users):
                dequantize.replace_all_uses_with(producer)
                self._module.graph.erase_node(dequantize)
            self._module.graph.erase_node(node)
            self._floats |= {producer} if moves else set()
            count += not moves
        if count:
            self._module.recompile()
        return count

    def _is_read_in_float(self, quantize: fx.Node) -> bool:
        return all(
            is_dequantize(user) and all(self._is_float(reader) for reader in user.users)
            for user in quantize.users
        )

    def _is_float(self, node: fx.Node) -> bool:
        if node.op == "output" or node in self._floats:
            return True
        decision = self._decisions.get(node.name)
        return decision is not None and not decision.quantized

    def _moves(self, node: fx.Node) -> bool:
        key = operator_key(node, self._modules)
        known = None if key is None else find(key.op)
        one = len(node.all_input_nodes) == 1 or node.op == "call_method"
        return known is not None and known.family == "shape" and known.shares_qparams and one

    def _is_weighted(self, node: fx.Node) -> bool:
        key = operator_key(node, self._modules)
        if key is None:
            return False
        if key.kind == "module" and len(node.args) + len(node.kwargs) > 1:
            return (
                False  # a convolution with the addition behind it: its kernel gives integers only
            )
        root = find_root(key.op) if key.kind == "module" else find(key.op)
        return root is not None and root.is_weighted and root.family in _WITH_FLOAT_RESULTS


_WITH_FLOAT_RESULTS: Collection[str] = ("conv", "linear")


def _is_quantize(node: fx.Node) -> bool:
    target = getattr(node.target, "_schema", None)
    return target is not None and target.name == "quantized_decomposed::quantize_per_tensor"
