"""Replaces nodes of an exported program; new nodes have the ``meta["val"]`` that other passes read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode

from backquant.operators import overload


def sizes_of(node: Any) -> list[Any]:
    """The shape of ``node``, for a view; one symbolic size is -1."""
    shape = list(node.meta["val"].shape)
    symbolic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    if len(symbolic) == 1:
        shape[symbolic[0]] = -1
    return shape


def before(node: Any, target: Any, args: tuple[Any, ...], **more: Any) -> Any:
    """A call before ``node`` that stands for the same operator of the model, with its value's meta.

    Its shape is found as an export finds it: kernels in C++ (of ``constant_pad_nd``) take sizes as numbers,
    and would fix those that are free.
    """
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, more)
    made.meta = dict(node.meta)
    values = torch.utils._pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], args)
    mode = detect_fake_mode((node.meta["val"], *values))
    assert mode is not None
    with mode, enable_python_dispatcher():
        made.meta["val"] = target(*values, **more)
    return made


@dataclass(frozen=True)
class AtenCalls:
    """Writes calls of aten operators before ``node``: ``AtenCalls(node).add(x, y)`` is the node of ``x + y``.

    >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    >>> [x, relu, output] = program.graph.nodes
    >>> doubled = AtenCalls(relu).mul(x, 2.0)
    >>> relu.replace_input_with(x, doubled)
    >>> [str(node.target) for node in program.graph.find_nodes(op="call_function", target=doubled.target)]
    ['aten.mul.Tensor']
    """

    node: Any

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.call, overload(name))

    def call(self, target: Any, *args: Any, **more: Any) -> Any:
        """The node of a call of any other operator."""
        return before(self.node, target, args, **more)


def replace(node: Any, by: Any) -> None:
    """Let all readers of ``node`` read ``by``, and remove ``node``."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
