"""Products with a constant matrix, as the linear layers that they are.

``x @ w``, as models that were imported from other formats have it, has no integer kernel of two activations
where ``w`` is one matrix for a batch of ``x``, and one of a linear layer does without a scale for ``w`` that
is measured. A constant that is then added along the last axis is the layer's bias.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from backquant.graph.arithmetic import arithmetic_of
from backquant.graph.edit import NamePool
from backquant.graph.folding import changed_tensors
from backquant.graph.provenance import Scope

_PRODUCTS = frozenset({torch.matmul, operator.matmul, torch.mm, "matmul", "mm"})


def linear_products(
    module: fx.GraphModule, scopes: dict[str, Scope], kept: Collection[Any] = ()
) -> int:
    """Write products with constant matrices as ``F.linear``, in place; how many. Operators in ``kept`` stay.

    >>> class Product(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w, self.b = torch.ones(3, 2), torch.ones(2)
    ...     def forward(self, x):
    ...         return x @ self.w + self.b
    >>> module = fx.symbolic_trace(Product())
    >>> linear_products(module, {}), [node.name for node in module.graph.nodes]
    (1, ['x', 'b', 'w_transposed_0', 'linear', 'output'])
    >>> module(torch.ones(1, 4, 3)).shape
    torch.Size([1, 4, 2])
    """
    constants = Constants(module)
    names = NamePool(module)
    products = [
        (node, matrix)
        for node in module.graph.nodes
        if node.target not in kept and (matrix := _matrix(node, constants)) is not None
    ]
    for node, matrix in products:
        path = names.take(f"{node.args[1].target}_transposed_")
        module.register_buffer(path, matrix.detach().t())
        _write(module.graph, node, path, _bias(node, constants, matrix.shape[1]), scopes)
    return len(products)


def _write(
    graph: fx.Graph, node: fx.Node, path: str, bias: fx.Node | None, scopes: dict[str, Scope]
) -> None:
    """A linear layer in the place of the product ``node``, and of the sum behind it."""
    replaced = [node] if bias is None else [next(iter(node.users)), node]
    with graph.inserting_before(replaced[0]):
        weight = graph.get_attr(path)
        more = () if bias is None else (bias,)
        made = graph.call_function(F.linear, (node.args[0], weight, *more))
    made.meta.update(node.meta)
    for new in (weight, made):
        scopes[new.name] = scopes.get(node.name, Scope("", None))
    matrix: Any = node.args[1]
    replaced[0].replace_all_uses_with(made)
    for old in (*replaced, matrix):
        if not old.users:
            graph.erase_node(old)
            scopes.pop(old.name, None)


class Constants:
    """The floating-point tensors that a graph reads and nothing changes.

    >>> Constants(fx.symbolic_trace(torch.nn.ReLU())).value(None) is None
    True
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._changed = changed_tensors(module)

    def value(self, node: Any) -> torch.Tensor | None:
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        if str(node.target) in self._changed:
            return None
        value = attrgetter(str(node.target))(self._module)
        return value if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def _matrix(node: fx.Node, constants: Constants) -> torch.Tensor | None:
    """What ``node`` multiplies an activation with, if that is one constant matrix."""
    if node.op not in ("call_function", "call_method") or node.target not in _PRODUCTS:
        return None
    if len(node.args) != 2 or node.kwargs or constants.value(node.args[0]) is not None:
        return None
    value = constants.value(node.args[1])
    return value if value is not None and value.dim() == 2 and value.numel() else None


def _bias(node: fx.Node, constants: Constants, width: int) -> fx.Node | None:
    """The constant that alone is added to ``node``, one number for each column."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) != 1 or arithmetic_of(user) != "add":
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    value = constants.value(other)
    fits = value is not None and tuple(value.shape) == (width,)
    return other if fits and isinstance(other, fx.Node) else None
