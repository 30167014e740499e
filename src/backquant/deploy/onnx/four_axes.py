"""Attention with four axes: PyTorch's ONNX exporter refuses any other number.

Fewer get axes of size 1 in front. Of more, those before the heads become one.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from backquant.deploy.edits import AtenCalls, replace, sizes_of
from backquant.operators import overload

__all__ = ["with_four_axes"]

_AXES = 4


def with_four_axes(node: fx.Node) -> fx.Node:
    """The attention that stands for ``node``, in its place.

    ``node`` itself where it has four axes already, or inputs that cannot be brought to the same.

    >>> import torch
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x): return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> program = torch.export.export(Attention(), (torch.zeros(3, 5, 4),))
    >>> node = program.graph.output_node().args[0][0]
    >>> made = with_four_axes(node)
    >>> made.meta["val"].shape, [user.name for user in made.users]
    (torch.Size([1, 3, 5, 4]), ['squeeze_dim'])
    """
    inputs: list[Any] = list(node.args[:3])
    rank, write = node.meta["val"].dim(), AtenCalls(node)
    shapes = [x.meta["val"].shape for x in inputs]
    if rank == _AXES or any(len(shape) != rank for shape in shapes):
        return node
    if rank > _AXES:
        return _with_one_front(node, inputs)
    more = _AXES - rank
    for _ in range(more):
        inputs = [write.unsqueeze(x, 0) for x in inputs]
    made: fx.Node = write.call(node.target, *inputs, *node.args[3:], **node.kwargs)
    result = made
    for _ in range(more):
        result = write.call(overload("squeeze", "dim"), result, 0)
    replace(node, result)
    return made


def _with_one_front(node: fx.Node, inputs: list[Any]) -> fx.Node:
    write, sizes = AtenCalls(node), sizes_of(node)
    front = node.meta["val"].shape[:-3]
    given = (*node.args[3:], *node.kwargs.values())
    masks = [value for value in given if isinstance(value, fx.Node)]
    is_free = any(not isinstance(size, int) for size in sizes)  # of more than one axis
    others = [*inputs, *[mask for mask in masks if mask.meta["val"].dim() >= _AXES]]
    if is_free or not all(_same(x.meta["val"].shape[:-3], front) for x in others):
        return node
    flat = {x: write.flatten(x, 0, -_AXES) for x in others}
    made: fx.Node = write.call(
        node.target,
        *[flat.get(value, value) if isinstance(value, fx.Node) else value for value in node.args],
        **{k: flat.get(v, v) if isinstance(v, fx.Node) else v for k, v in node.kwargs.items()},
    )
    replace(node, write.reshape(made, sizes))
    return made


def _same(one: Any, other: Any) -> bool:
    """Without a guard on free sizes."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in pairs)
