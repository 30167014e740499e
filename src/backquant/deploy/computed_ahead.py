"""Products, tables and numbers that depend on no input, in a file of fixed sizes: constants, computed once.

1. The first self-attention of a detector's decoder reads its queries alone, which are parameters repeated for
   each image. A runtime folds what it reads to a float constant, and computes the product in float at each
   call.
2. Masks of shifted windows are written region by region into new zeros. Regions of a small input are empty,
   and OpenVINO does not write into nothing.
3. Margins are computed in tensors of sizes, and read from them (``torch.tensor(x.shape) ... .tolist()``): to
   ``torch.export`` such numbers depend on the values of a tensor.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from backquant.deploy.read_sizes import Recorder, known_nodes
from backquant.graph.edit import NamePool
from backquant.graph.folding import changed_tensors

_WRITES = ("slice_scatter", "select_scatter")
_READS = ("tolist", "item", "int", "float", "bool")


def compute_ahead(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], products: Collection[str]
) -> frozenset[str]:
    """Replace, in place, what depends on constants and sizes by its value: the ``products``, what is made of
    writes into tensors, and numbers that are read from tensors. The names of these products.

    Args:
        module: a reference graph, which is run once if it has something of these.
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
    numbers = [node for node in module.graph.nodes if node in known and _reads_numbers(node)]
    wanted = list(dict.fromkeys((*wanted, *_written(module, known), *numbers)))
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
    for node in numbers:
        _write(node, recorded.values[node])
    for node in reversed(list(module.graph.nodes)):
        if node in known and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return frozenset(node.name for node in computed if node.name in products)


def _reads_numbers(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return node.op in ("call_function", "call_method") and name in _READS


def _write(node: fx.Node, value: Any) -> None:
    """Let the readers of ``node`` read ``value`` in its place, if it is numbers."""
    if not all(isinstance(number, (bool, int, float)) for number in tree_leaves(value)):
        return
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg(
            (user.args, user.kwargs), lambda given: value if given is node else given
        )


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
