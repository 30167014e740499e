"""Products and tables that depend on no input, in a file of fixed sizes: constants, computed once.

1. The first self-attention of a detector's decoder reads its queries alone, which are parameters repeated for
   each image. A runtime folds what it reads to a float constant, and computes the product in float at each
   call.
2. Masks of shifted windows are written region by region into new zeros. Regions of a small input are empty,
   and OpenVINO does not write into nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from backquant.deploy.read_sizes import Recorder, known_nodes
from backquant.graph.edit import NamePool
from backquant.graph.folding import changed_tensors

_WRITES = ("slice_scatter", "select_scatter")


def compute_ahead(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], products: Collection[str]
) -> frozenset[str]:
    """Replace, in place, what depends on constants and sizes by its value: the ``products``, and what is made
    of writes into tensors. The names of these products.

    Args:
        module: a reference graph, which is run once if it has such products.
        args: inputs of it, of the sizes that the file is for.
        kwargs: the same, by keyword.
        products: the names of the nodes that multiply.

    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = torch.nn.Parameter(torch.ones(1, 2))
    ...         self.w = torch.nn.Parameter(torch.ones(2, 2))
    ...     def forward(self, x):
    ...         return x @ self.w + self.table.expand(x.shape[0], 2) @ self.w
    >>> module = fx.symbolic_trace(Model())
    >>> compute_ahead(module, (torch.ones(3, 2),), {}, ["matmul", "matmul_1"])
    frozenset({'matmul_1'})
    >>> module(torch.ones(3, 2))[0].tolist()
    [4.0, 4.0]
    """
    known = known_nodes(module, changed_tensors(module))
    wanted = [node for node in module.graph.nodes if node in known and node.name in products]
    wanted = list(dict.fromkeys((*wanted, *_written(module, known))))
    if not wanted:
        return frozenset()
    recorded = Recorder(module, set(wanted))
    with torch.no_grad():
        recorded.call(args, kwargs)
    pool = NamePool(module)
    computed = [node for node in wanted if isinstance(recorded.values[node], torch.Tensor)]
    for node in computed:
        path = pool.take(f"{node.name}_computed_")
        module.register_buffer(path, recorded.values[node].clone())
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(path))
    for node in reversed(list(module.graph.nodes)):
        if node in known and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return frozenset(node.name for node in computed if node.name in products)


def _written(module: fx.GraphModule, known: Collection[fx.Node]) -> list[fx.Node]:
    """The results of writes into known tensors that any other node reads, or that are rounded: a product
    reads them as integers then."""
    made: set[fx.Node] = set()
    for node in module.graph.nodes:
        reads = not made.isdisjoint(node.all_input_nodes) and not _rounds(node)
        if node in known and (_writes(node) or reads):
            made.add(node)
    return [
        node
        for node in module.graph.nodes
        if node in made
        and any(user.op != "output" and (user not in known or _rounds(user)) for user in node.users)
    ]


def _rounds(node: fx.Node) -> bool:
    return "quantize_per_" in str(node.target)


def _writes(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return node.op.startswith("call_") and name in _WRITES
