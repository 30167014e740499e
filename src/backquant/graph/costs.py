"""Multiply-adds per node, measured by running the graph once on example inputs.

Counting is PyTorch's own (``torch.utils.flop_counter``), which counts two operations for each
multiply-add of convolutions, matrix products and attention. It knows nothing of recurrent layers: their
weights are multiplied once for each step of each sequence.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from backquant.graph.example import as_arguments

__all__ = ["multiply_adds"]


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Operations of the two products of an attention, from the shapes of its arguments."""
    *batch, length, width = q
    return int(2 * math.prod(batch) * length * k[-2] * (width + v[-1]))


# PyTorch counts those of GPUs only.
_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


class _Counter(Interpreter):
    """Counts each node's floating point operations."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.counts: dict[str, int] = {}

    def run_node(self, n: Node) -> Any:
        if n.op not in ("call_module", "call_function", "call_method"):
            return super().run_node(n)
        with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
            result = super().run_node(n)
        if total := counter.get_total_flops() // 2 or self._recurrent(n, result):
            self.counts[n.name] = total
        return result

    def _recurrent(self, n: Node, result: Any) -> int:
        """Multiply-adds of a recurrent layer whose outputs are ``result``."""
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if not isinstance(module, nn.RNNBase):
            return 0
        output = result[0]
        values = output.data if isinstance(output, PackedSequence) else output
        steps = values.numel() // values.shape[-1]
        weights = (w for name, w in module.named_parameters() if name.startswith("weight"))
        return int(steps * sum(weight.numel() for weight in weights))


def multiply_adds(module: GraphModule, example_inputs: Any) -> dict[str, int]:
    """Multiply-adds of each node that has any, by node name.

    Args:
        module: a float graph in eval mode; it is run once without gradients.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.

    >>> from torch.fx import symbolic_trace
    >>> from torch import nn
    >>> gm = symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    >>> multiply_adds(gm, (torch.zeros(2, 4),))
    {'_0': 64}
    """
    module.recompile()  # a deferred graph module has no signature before
    args, kwargs = as_arguments(example_inputs)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    counter = _Counter(module)
    with torch.no_grad():
        counter.run(*bound.args, *bound.kwargs.values())
    return counter.counts
