"""Products with a constant matrix, as the linear layers that they are.

``x @ w``, as models that were imported from other formats have it, has no integer kernel of two activations
where ``w`` is one matrix for a batch of ``x``, and one of a linear layer does without a scale for ``w`` that
is measured. A constant that is then added along the last axis is the layer's bias.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.nn import functional as F

from backquant.graph.arithmetic import arithmetic_of
from backquant.graph.rewrite import GraphRewriter, only_reader

_PRODUCTS = frozenset({torch.matmul, operator.matmul, torch.mm, "matmul", "mm"})


def linear_product(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """A product with a constant matrix as ``F.linear``, with what is added to it.

    >>> class Product(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w, self.b = torch.ones(3, 2), torch.ones(2)
    ...     def forward(self, x):
    ...         return x @ self.w + self.b
    >>> module = fx.symbolic_trace(Product())
    >>> GraphRewriter(module).apply(linear_product), [node.name for node in module.graph.nodes]
    (1, ['x', 'b', 'w_transposed_0', 'linear', 'output'])
    >>> module(torch.ones(1, 4, 3)).shape
    torch.Size([1, 4, 2])
    """
    matrix = _matrix(node, write)
    if matrix is None:
        return None
    bias, last = _bias(node, write, matrix.shape[1]), only_reader(node)
    weight = write.buffer(node, f"{node.args[1].target}_transposed_", matrix.detach().t())  # type: ignore[union-attr]
    if bias is None or last is None:
        return write.call(node, F.linear, node.args[0], weight)
    made = write.call(node, F.linear, node.args[0], weight, bias)
    for new in (weight, made):  # the bias may be read behind the product
        last.prepend(new)
    write.replace(last, made)
    return made


def _matrix(node: fx.Node, write: GraphRewriter) -> torch.Tensor | None:
    """What ``node`` multiplies an activation with, if that is one constant matrix."""
    if node.op not in ("call_function", "call_method") or node.target not in _PRODUCTS:
        return None
    if len(node.args) != 2 or node.kwargs or write.constants.value(node.args[0]) is not None:
        return None
    value = write.constants.value(node.args[1])
    return value if value is not None and value.dim() == 2 and value.numel() else None


def _bias(node: fx.Node, write: GraphRewriter, width: int) -> fx.Node | None:
    """The constant that alone is added to ``node``, one number for each column."""
    reader = only_reader(node)
    if reader is None or arithmetic_of(reader) != "add":
        return None
    other = reader.args[1] if reader.args[0] is node else reader.args[0]
    value = write.constants.value(other)
    fits = value is not None and tuple(value.shape) == (width,)
    return other if fits and isinstance(other, fx.Node) else None
