"""Pooling whose window is the whole of its input, written as the global pooling that it is.

``F.avg_pool2d(x, x.size()[2:])`` asks for a window that is computed, which has no integer kernel and which a
file may not name; ``F.adaptive_avg_pool2d(x, 1)`` gives the same for all sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from backquant.graph.rewrite import GraphRewriter, arguments_by_name

#: The number of axes, and what pools all of them.
_POOLS: dict[Any, tuple[int, Callable[..., Any]]] = {
    F.avg_pool1d: (1, F.adaptive_avg_pool1d),
    F.avg_pool2d: (2, F.adaptive_avg_pool2d),
    F.avg_pool3d: (3, F.adaptive_avg_pool3d),
    F.max_pool1d: (1, F.adaptive_max_pool1d),
    F.max_pool2d: (2, F.adaptive_max_pool2d),
    F.max_pool3d: (3, F.adaptive_max_pool3d),
    torch.max_pool1d: (1, F.adaptive_max_pool1d),
    torch.max_pool2d: (2, F.adaptive_max_pool2d),
}
#: What arguments may be where nothing is around the input.
_PLAIN: dict[str, tuple[Any, ...]] = {"dilation": (1,), "count_include_pad": (True, False)}


def whole_pool(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """Such a pooling, under the same name. The rank of the input is that of a batch.

    >>> module = fx.symbolic_trace(lambda x: F.avg_pool2d(x, x.size()[2:]))
    >>> GraphRewriter(module).apply(whole_pool), [node.name for node in module.graph.nodes]
    (1, ['x', 'avg_pool2d', 'output'])
    >>> module(torch.ones(1, 2, 3, 5)).shape
    torch.Size([1, 2, 1, 1])
    """
    axes, pool = _POOLS.get(node.target, (0, None))
    x = None if pool is None else _whole(node, axes)
    return None if x is None else write.retarget(node, pool, x, 1)


def _whole(node: fx.Node, axes: int) -> fx.Node | None:
    """What is pooled, where the window is all of it and nothing else is said."""
    given = arguments_by_name(node, "input", "kernel_size")
    x, window = given.pop("input", None), given.pop("kernel_size", None)
    plain = all(value in _PLAIN.get(word, (None, 0, False)) for word, value in given.items())
    if not isinstance(x, fx.Node) or len(node.args) > 2 or not plain:
        return None
    if isinstance(window, (list, tuple)) and len(window) == axes:
        each = [_axis(one, x, axes) for one in window]
        return x if each == list(range(axes)) else None
    if axes == 1 and _axis(window, x, axes) == 0:
        return x
    return x if _last_sizes(window, x, axes) else None


def _axis(size: Any, x: fx.Node, axes: int) -> int | None:
    """Which of the pooled axes ``size`` is the size of, from the first."""
    if not isinstance(size, fx.Node):
        return None
    place = size.args[1] if len(size.args) == 2 else None
    is_read = size.target == "size" and size.args[0] is x
    is_item = size.target is operator.getitem and _is_shape(size.args[0], x)
    if not isinstance(place, int) or not (is_read or is_item):
        return None
    return place + axes if place < 0 else place - 2


def _last_sizes(sizes: Any, x: fx.Node, axes: int) -> bool:
    """Whether ``sizes`` are ``x.shape[2:]``, or the last ones."""
    if not isinstance(sizes, fx.Node) or sizes.target is not operator.getitem:
        return False
    source, place = sizes.args
    return _is_shape(source, x) and place in (slice(2, None), slice(-axes, None))


def _is_shape(node: Any, x: fx.Node) -> bool:
    if not isinstance(node, fx.Node) or not node.args or node.args[0] is not x:
        return False
    return (node.target == "size" and len(node.args) == 1) or (
        node.target is getattr and node.args[1] == "shape"
    )
