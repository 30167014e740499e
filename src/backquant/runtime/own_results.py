"""Results never share memory with the model, nor with the result of an earlier call.

What depends on no input (a state of zeros, a table) is a tensor of the graph, computed once; the model that
was quantized may have made it anew at each call. The caller may write into what it got.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from backquant.graph import get_module
from backquant.graph.mutation import changes_argument, is_view


def returned_tensors(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """The tensors of ``graph_module`` whose memory a result may share, by their paths. Cost: linear.

    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = torch.nn.Parameter(torch.ones(2, 2))
    ...         self.bias = torch.nn.Parameter(torch.ones(2))
    ...     def forward(self, x):
    ...         return x + self.bias, self.table[0]
    >>> returned_tensors(fx.symbolic_trace(Net()))
    ('table',)
    """
    found: dict[str, None] = {}
    pending = list(graph_module.graph.output_node().all_input_nodes)
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.op == "get_attr":
            found[str(node.target)] = None
        elif _passes_on(graph_module, node):
            more = [source for source in node.all_input_nodes if source not in seen]
            seen.update(more)
            pending += more
    return tuple(found)


def _passes_on(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a result may share the memory of an argument."""
    if not node.op.startswith("call_"):
        return False
    called = get_module(module, str(node.target)) if node.op == "call_module" else None
    return is_view(node, called) or changes_argument(node, called)


def with_own_memory(result: Any, graph_module: fx.GraphModule, paths: Iterable[str]) -> Any:
    """``result`` with copies of the tensors in it that share memory with those of ``paths``.

    >>> module = torch.nn.Linear(2, 2)
    >>> kept, other = torch.ones(1), module.bias[:1]
    >>> found = with_own_memory((kept, other), module, ["bias"])
    >>> found[0] is kept, found[1].data_ptr() == other.data_ptr(), torch.equal(found[1], other)
    (True, False, True)
    """
    held = [_memory(attrgetter(path)(graph_module)) for path in paths]
    taken = {address for address in held if address}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if _memory(tensor) in taken else tensor

    return tree_map_only(torch.Tensor, own, result)


def _memory(tensor: Any) -> int:
    plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0
