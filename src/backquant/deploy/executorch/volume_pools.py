"""Pools and resizing of volumes, as ones of their images and then of their depths.

ExecuTorch 1.5 has no kernel for volumes. The largest value, the mean and interpolated values of a window are
those along one axis after another. Values stay, but for the order of a sum. At most one size may be free.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from backquant.deploy.edits import AtenCalls, Rule, apply, first_only, sizes_of
from backquant.deploy.executorch.pools import adaptive, pool_of_images
from backquant.operators import overload

__all__ = ["VOLUME_POOLS", "can_be_viewed", "product"]

_VOLUME = 5  # axes: sample, channels, depth, rows, columns
#: What does nothing along an axis.
_NOTHING = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
#: Calls an operator of images on a node.
_Call = Callable[[Any], Any]


def can_be_viewed(*nodes: Any) -> bool:
    """Whether a view can say the sizes of each.

    >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones(2, 0),))
    >>> [can_be_viewed(node) for node in program.graph.find_nodes(op="placeholder")]
    [False]
    """
    sizes = [size for node in nodes for size in sizes_of(node)]
    return all(isinstance(size, int) and size for size in sizes)


def product(*sizes: Any) -> int:
    """Of sizes that are known; -1 where one is free.

    >>> product(2, 3), product(2, -1)
    (6, -1)
    """
    return -1 if -1 in sizes else math.prod(sizes)


def pool(node: Any, write: AtenCalls) -> Any:
    """``max_pool3d`` and ``avg_pool3d``."""
    said = _arguments(node)
    if said.get("divisor_override") is not None:
        return None
    said["stride"] = said["stride"] or said["kernel_size"]
    windows = {name: _three(said[name]) for name in _NOTHING if name in said}
    more = [said[name] for name in ("ceil_mode", "count_include_pad") if name in said]
    target = overload("max_pool2d" if "dilation" in said else "avg_pool2d")
    made: list[Any] = []

    def of_images(images: Any) -> Any:
        sizes = [of[1:] for of in windows.values()]
        if all(of == [_NOTHING[name]] * 2 for name, of in zip(windows, sizes, strict=True)):
            return images
        made.append(write.call(target, images, *sizes, *more))
        return made[-1]

    def of_depths(columns: Any) -> Any:
        made.append(
            write.call(
                target, columns, *([of[0], _NOTHING[name]] for name, of in windows.items()), *more
            )
        )
        return made[-1]

    result = _one_after_another(node, write, of_images, of_depths)
    for each in made:
        apply(pool_of_images, each)
    return result


def _arguments(node: Any) -> dict[str, Any]:
    schema = node.target._schema.arguments
    said = {each.name: each.default_value for each in schema}
    return said | dict(zip(said, node.args, strict=False)) | dict(node.kwargs)


def _three(sizes: Any) -> list[int]:
    found = [sizes] if isinstance(sizes, int) else list(sizes)
    return found * 3 if len(found) == 1 else found


def _one_after_another(node: Any, write: AtenCalls, of_images: _Call, of_depths: _Call) -> Any:
    """What the two calls make of the input of ``node``; ``None``, and nothing, if they cannot."""
    source, result = node.args[0], node
    if not isinstance(node.meta["val"], torch.Tensor):
        if not first_only(node) or not node.users:
            return None
        result = next(iter(node.users))
    if not can_be_viewed(result, source):
        return None
    sizes = sizes_of(source)
    samples, channels, depth, *plane = sizes if len(sizes) == _VOLUME else [1, *sizes]
    images = of_images(write.reshape(source, [samples, product(channels, depth), *plane]))
    columns = [samples, channels, depth, product(*sizes_of(images)[2:])]
    return write.reshape(of_depths(write.reshape(images, columns)), sizes_of(result))


def adaptive_pool(node: Any, write: AtenCalls) -> Any:
    """``adaptive_avg_pool3d``, and ``adaptive_max_pool3d`` where nobody reads the places."""
    depth, *plane = node.args[1]
    is_mean = isinstance(node.meta["val"], torch.Tensor)
    target = overload("adaptive_avg_pool2d" if is_mean else "adaptive_max_pool2d")
    made: list[Any] = []

    def called(images: Any, sizes: list[int]) -> Any:
        made.append(write.call(target, images, sizes))
        return made[-1] if is_mean else write.call(operator.getitem, made[-1], 0)

    def of_images(images: Any) -> Any:
        return called(images, plane)

    def of_depths(columns: Any) -> Any:
        return called(columns, [depth, math.prod(plane)])

    result = _one_after_another(node, write, of_images, of_depths)
    for each in made:
        apply(adaptive, each)
    return result


def resize(node: Any, write: AtenCalls) -> Any:
    """``upsample_nearest3d`` and ``upsample_trilinear3d``."""
    sizes, *corners, factors = (*node.args[1:], None)[: len(node.target._schema.arguments) - 1]
    target = overload(_RESIZES[node.target], "vec")

    def of_images(images: Any) -> Any:
        return write.call(target, images, sizes and sizes[1:], *corners, factors and factors[1:])

    def of_depths(columns: Any) -> Any:
        beside = sizes_of(columns)[3]
        return write.call(
            target, columns, sizes and [sizes[0], beside], *corners, factors and [factors[0], 1.0]
        )

    if node.kwargs or (sizes is not None and -1 in sizes_of(node)[-2:]):
        return None
    return _one_after_another(node, write, of_images, of_depths)


_RESIZES = {
    overload("upsample_nearest3d", "vec"): "upsample_nearest2d",
    overload("upsample_trilinear3d", "vec"): "upsample_bilinear2d",
}

#: The rules by operator.
VOLUME_POOLS: dict[Any, Rule] = {
    overload("max_pool3d"): pool,
    overload("avg_pool3d"): pool,
    overload("adaptive_avg_pool3d"): adaptive_pool,
    overload("adaptive_max_pool3d"): adaptive_pool,
    **dict.fromkeys(_RESIZES, resize),
}
