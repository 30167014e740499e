"""Maxima over axes, and pools, in the spelling of four dimensions that XNNPACK takes. Values stay.

Source: ExecuTorch 1.5, ``backends/xnnpack/partition/config`` and ``operators/op_max_dim.py``.

1. The partitioner takes the largest values over any axis of four dimensions; the delegate refuses all but
   ``max`` over axis 2 or 3 with ``keepdim=True``, and ``amax`` always. A maximum over neighbouring axes is
   one over axis 2 of a view. Where a size is free that no view can say, or the axis itself, ``amax``
   computes outside of the delegate, whose windows are of one size.
2. Pools of one dimension, and of images without a batch, run on views of four dimensions.
3. An adaptive pool whose sizes divide is one of that window: the others have no kernel in the delegate, and
   those of maxima none at all.
4. The delegate has no ceil mode. Where the last window ends inside, the mode changes nothing (windows that
   are larger than the image have been cut: ``operators.windows``). Others compute outside of the delegate.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from backquant.deploy.edits import AtenCalls, Rule, apply, first_only, sizes_of
from backquant.operators import overload

__all__ = ["POOLS"]

_LARGEST, _LARGEST_AND_PLACES = overload("amax"), overload("max", "dim")


def maximum(node: Any, write: AtenCalls) -> Any:
    """Rule 1."""
    source, axes, keep = (*node.args, *([], False)[len(node.args) - 1 :])[:3]
    value = source.meta["val"]
    has_places = node.target is _LARGEST_AND_PLACES
    rank = value.dim()
    axes = sorted(axis % max(rank, 1) for axis in ([axes] if has_places else axes or range(rank)))
    if value.dtype is not torch.float32 or not rank or (has_places and not first_only(node)):
        return None
    sizes = list(value.shape)
    low, high = axes[0], axes[-1] + 1
    four = [1, *(_product(part) for part in (sizes[:low], sizes[low:high], sizes[high:]))]
    result = (next(iter(node.users)) if has_places else node) if node.users else node
    wanted = sizes_of(result)
    if axes != list(range(low, high)) or not _can_be_viewed(four, wanted):
        return write.call(_LARGEST, source, axes, keep) if has_places else None
    view = write.reshape(source, four)
    largest = write.call(_LARGEST_AND_PLACES, view, 2, True)
    return write.reshape(write.call(operator.getitem, largest, 0), wanted)


def _product(sizes: list[Any]) -> int:
    """Of sizes that are known; -1 of others."""
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else -1


def _can_be_viewed(four: list[int], wanted: list[Any]) -> bool:
    free = four.count(-1)
    return four[2] > 0 and free < 2 and 0 not in four and _is_known(wanted)


def _is_known(sizes: list[Any]) -> bool:
    """Whether a view can say them."""
    return all(isinstance(size, int) for size in sizes) and sizes.count(-1) < 2


def pool_of_one_dimension(node: Any, write: AtenCalls) -> Any:
    """Rule 2."""
    source, *windows = node.args
    sizes = sizes_of(source)
    name = str(node.target._schema.name).removeprefix("aten::").replace("1d", "2d")
    if not _is_known(sizes) or node.kwargs:
        return None
    around = (0 if place == 2 else 1 for place in range(len(windows)))  # padding is the third
    two = [
        [other, *window] if isinstance(window, (list, tuple)) and window else window
        for other, window in zip(around, windows, strict=True)
    ]
    image = write.reshape(source, [*(sizes if len(sizes) == 3 else [1, *sizes])[:2], 1, sizes[-1]])
    made = write.call(overload(name), image, *two)
    result, value = node, made
    if not isinstance(node.meta["val"], torch.Tensor):
        if not first_only(node) or not node.users:
            return None
        result, value = next(iter(node.users)), write.call(operator.getitem, made, 0)
    reshaped = write.reshape(value, sizes_of(result))
    apply(adaptive, made)
    return reshaped


def without_batch(node: Any, write: AtenCalls) -> Any:
    """Rule 2, of images of three dimensions."""
    source, *more = node.args
    sizes = sizes_of(source)
    if len(sizes) != 3 or not _is_known(sizes):
        return None
    made = write.call(node.target, write.reshape(source, [1, *sizes]), *more, **node.kwargs)
    return write.reshape(made, sizes_of(node))


def pool_of_images(node: Any, write: AtenCalls) -> Any:
    """Rules 4 and 2."""
    names = [argument.name for argument in node.target._schema.arguments]
    said = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    said |= dict(zip(names, node.args, strict=False)) | node.kwargs
    given = sizes_of(node.args[0])[-2:]
    if said["ceil_mode"] and _is_known(given) and -1 not in given:
        windows = said["kernel_size"], said["stride"] or said["kernel_size"], said["padding"]
        two = [_both(sizes) for sizes in (*windows, said.get("dilation", 1))]
        sides = list(zip(given, *two, strict=True))
        if all(_ends_inside(*side) for side in sides):
            said["ceil_mode"] = False
            node.args, node.kwargs = tuple(said[name] for name in names), {}
    return without_batch(node, write)


def _both(sizes: Any) -> list[int]:
    found = [sizes] if isinstance(sizes, int) else list(sizes)
    return found * 2 if len(found) == 1 else found


def _ends_inside(size: int, window: int, step: int, padding: int, dilation: int) -> bool:
    free = size + 2 * padding - dilation * (window - 1) - 1
    return free >= 0 and free % step == 0


def adaptive(node: Any, write: AtenCalls) -> Any:
    """Rule 3."""
    if node.target not in _WINDOWS:
        return None
    source, wanted = node.args
    value = source.meta["val"]
    given = value.shape[-2:]
    if value.dim() != 4 or not all(isinstance(size, int) and size for size in (*given, *wanted)):
        return None
    if any(size % out for size, out in zip(given, wanted, strict=True)):
        return None
    window = [size // out for size, out in zip(given, wanted, strict=True)]
    # the mean of all has a kernel of its own, also on integers
    stays = wanted == [1, 1] if node.target is not _ADAPTIVE_MAXIMUM else not first_only(node)
    return None if stays else write.call(_WINDOWS[node.target], source, window, window)


_ADAPTIVE_MAXIMUM = overload("adaptive_max_pool2d")
_WINDOWS = {
    overload("adaptive_avg_pool2d"): overload("avg_pool2d"),
    _ADAPTIVE_MAXIMUM: overload("max_pool2d"),
}

#: The rules by operator.
POOLS: dict[Any, Rule] = {
    _LARGEST: maximum,
    _LARGEST_AND_PLACES: maximum,
    overload("max_pool2d"): pool_of_images,
    overload("avg_pool2d"): pool_of_images,
    **{
        overload(name): pool_of_one_dimension
        for name in ("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d")
    },
    **dict.fromkeys(_WINDOWS, adaptive),
}
