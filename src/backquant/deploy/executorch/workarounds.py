"""What ExecuTorch 1.5 has no kernels for, or computes wrong, and what is written instead."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from backquant.deploy.edits import AtenCalls, Rules, arguments, operands, replace, sizes_of
from backquant.lower.qdq import is_dequantize
from backquant.operators import named, overload

WORKAROUNDS = Rules()

# Paddings with negative sizes, which ExecuTorch 1.5 has no kernel for, as slices.


@WORKAROUNDS.on("constant_pad_nd", "pad")
def cut(node: fx.Node, write: AtenCalls) -> Any:
    """What a negative size takes off is sliced off; then what others add is put on."""
    source, sizes, *more = operands(node)
    mode = arguments(node).get("mode", "constant")
    if mode != "constant" or not all(isinstance(size, int) for size in sizes):
        return None
    if min(sizes, default=0) >= 0:
        return None
    value, rank = source, source.meta["val"].dim()
    for place in range(len(sizes) // 2):
        front, behind = (min(size, 0) for size in sizes[2 * place : 2 * place + 2])
        axis = rank - 1 - place
        if front or behind:
            end = behind or 2**63 - 1
            value = write.call(overload("slice", "Tensor"), value, axis, -front, end)
    rest = [max(size, 0) for size in sizes]
    if any(rest):
        value = write.call(node.target, value, rest, *more, **node.kwargs)
    return value


# ``select``, ``unbind`` and ``split`` as slices: the delegate of ExecuTorch 1.5 lacks the former.
#
# A split stays where the delegate would not take its slices: of integers, and of sizes that are free.


@WORKAROUNDS.on(*named("select").aten)
def one(node: fx.Node, write: AtenCalls) -> Any:
    """``select``."""
    source, axis, index = operands(node)
    size = source.meta["val"].shape[axis]
    is_known = isinstance(index, int) and isinstance(size, int)
    return _one_of(write, source, axis, index % size) if is_known else None


@WORKAROUNDS.on(*named("unbind").aten)
def each(node: fx.Node, _: AtenCalls) -> None:
    """``unbind``."""
    source, axis = arguments(node).values()
    for item in list(node.users):
        if item.target is operator.getitem:
            replace(item, _one_of(AtenCalls(item), source, axis, operands(item)[1]))
    if not node.users:
        node.graph.erase_node(node)


def _one_of(write: AtenCalls, source: Any, axis: int, index: int) -> Any:
    return write.reshape(write.slice(source, axis, index, index + 1), sizes_of(write.node))


@WORKAROUNDS.on("split.Tensor", "split_with_sizes")
def pieces(node: fx.Node, _: AtenCalls) -> None:
    """``split``, by a size or by sizes."""
    source, _sizes, axis = arguments(node).values()
    value, found = source.meta["val"], node.meta["val"]
    free = not all(isinstance(size, int) for size in value.shape)
    if free or value.dtype is not torch.float32 or any(part.shape[axis] == 0 for part in found):
        return
    ends = list(accumulate(part.shape[axis] for part in found))
    for item in list(node.users):
        if item.target is operator.getitem:
            place = operands(item)[1] % len(ends)
            start = ends[place] - found[place].shape[axis]
            cut = AtenCalls(item).slice(source, axis % value.dim(), start, ends[place])
            replace(item, cut)
    if not node.users:
        node.graph.erase_node(node)


# ``sort`` and ``histc``, which ExecuTorch 1.5 has no kernels for, by what it has. Mixtures of experts order
# tokens by their experts, and count them.
#
# 1. ``sort`` and ``argsort`` along an axis of known length are ``topk`` of all. One that must be stable
#   stays.
# 2. ``histc`` between two given bounds compares what it counts with the number of each bin.


@WORKAROUNDS.on("sort", "sort.stable", "argsort", "argsort.stable")
def order(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 1, also for the places alone (``argsort``)."""
    given = arguments(node)
    source, axis = given["self"], given["dim"]
    value = source.meta["val"]
    size = value.shape[axis] if value.dim() else None
    if given.get("stable") or not isinstance(size, int):
        return None
    found = write.topk(source, size, axis, bool(given["descending"]))
    only_places = isinstance(node.meta["val"], torch.Tensor)
    return write.call(operator.getitem, found, 1) if only_places else found


@WORKAROUNDS.on("histc")
def count(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 2."""
    source, bins, low, high = arguments(node).values()
    if node.kwargs or low >= high or source.meta["val"].dtype is not torch.float32:
        return None
    flat = write.reshape(source, [-1, 1])
    share = write.call(overload("div", "Tensor"), write.sub(flat, float(low)), float(high - low))
    places = write.floor(write.mul(share, float(bins)))
    last = write.call(overload("clamp"), places, None, float(bins - 1))
    numbers = write.call(overload("arange"), bins, dtype=torch.float32)
    falls = write.call(overload("eq", "Tensor"), last, numbers)
    inside = write.call(overload("le", "Scalar"), flat, float(high))
    counted = write.call(overload("logical_and"), falls, inside)
    floats = write.call(overload("_to_copy"), counted, dtype=torch.float32)
    return write.call(overload("sum", "dim_IntList"), floats, [0], False)


# ``softplus`` and ``mish`` by operators that XNNPACK has.
#
# ExecuTorch 1.5 takes ``softplus`` apart into a comparison, which runs outside of the delegate, and an
# exponential inside of it. Behind a convolution the delegate then gives two results whose layouts differ, one
# is rearranged twice, and the program stops at run time. As ``max(x, 0) + log(1 + exp(-|x|))``, the same in
# exact arithmetic and without overflow for any ``x``, all of it stays inside.


@WORKAROUNDS.on("softplus")
def _softplus(node: fx.Node, write: AtenCalls) -> Any:
    source, beta, _ = arguments(node).values()
    beta = float(beta)
    if not source.meta["val"].is_floating_point() or beta <= 0:
        return None
    scaled = source if beta == 1 else write.mul(source, beta)
    value = _written(write, scaled)
    return value if beta == 1 else write.mul(value, 1 / beta)


@WORKAROUNDS.on("mish")
def _mish(node: fx.Node, write: AtenCalls) -> Any:
    [source] = operands(node)
    is_float = source.meta["val"].is_floating_point()
    return write.mul(source, write.tanh(_written(write, source))) if is_float else None


def _written(write: AtenCalls, value: Any) -> Any:
    small = write.exp(write.neg(write.abs(value)))
    return write.add(write.relu(value), write.log(write.add(small, 1.0)))


# Means of integers with free sizes: in float, and rounded where they are quantized.
#
# XNNPACK's mean of integers (ExecuTorch 1.5) keeps the room for its sums that an earlier, smaller call
# needed: some batches larger than the one before give wrong numbers. A clamp that changes nothing,
# between the mean and what it dequantizes, keeps the delegate from computing on integers.

REASON = "XNNPACK's mean of integers is wrong in a larger batch than the one before, where sizes are free"
_MEANS = frozenset(named("mean").aten)
_POOLS = frozenset(overload(f"adaptive_avg_pool{dims}d") for dims in (1, 2))


def means_of_free_sizes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that this is about, pools to one value among them."""
    for node in graph.nodes:
        is_mean = node.target in _MEANS or (node.target in _POOLS and {*node.args[1]} == {1})
        if is_mean and is_dequantize(node.args[0]) and _is_free(node.args[0]):
            yield node


def _is_free(node: fx.Node) -> bool:
    return not all(isinstance(size, int) for size in node.meta["val"].shape)


def compute_in_float(node: fx.Node) -> None:
    """Put the clamp before one of them."""
    source, widest = operands(node)[0], torch.finfo(torch.float32)
    node.replace_input_with(source, AtenCalls(node).clamp(source, widest.min, widest.max))


# Bicubic resizing to a known size, as one product with a matrix along the columns and one along the rows.
#
# The delegate of ExecuTorch 1.5 has none, and its other kernels gather sixteen images that are added up: of
# CrossViT, which resizes its input, most of the time. The matrices are what the operator makes of unit ones.

_BICUBIC = overload("upsample_bicubic2d")
_MOST = 4096  # rows and columns: beyond, sixteen gathers are fewer operations


@WORKAROUNDS.on(_BICUBIC, "upsample_bicubic2d.vec")
def resize(node: fx.Node, write: AtenCalls) -> Any:
    """``upsample_bicubic2d``."""
    source, _, corners, *scales = arguments(node).values()
    if node.target is not _BICUBIC:
        scales = scales[0] or []
    height, width = (*scales, None, None)[:2]
    before, after = source.meta["val"], node.meta["val"]
    sizes = [*before.shape[2:], *after.shape[2:]]
    if node.kwargs or before.dtype is not torch.float32:
        return None
    if not all(isinstance(size, int) for size in sizes) or sum(sizes[:2]) > _MOST:
        return None

    def matrix(old: int, new: int, scale: Any) -> Any:
        unit = write.reshape(write.call(overload("eye"), old), [1, 1, old, old])
        made = write.call(_BICUBIC, unit, [new, old], corners, scale, None)
        return write.reshape(made, [new, old])

    columns = write.linear(source, matrix(sizes[1], sizes[3], width))
    turned = write.permute(columns, [0, 1, 3, 2])
    rows = write.linear(turned, matrix(sizes[0], sizes[2], height))
    return write.permute(rows, [0, 1, 3, 2])


# Depthwise convolutions in float whose windows are too large for XNNPACK's kernels, as a sum of small ones.
#
# XNNPACK has depthwise kernels of up to 25 taps. A larger window runs as a matrix product of one column for
# each channel: of 7 × 7 the parts take half of that time (benchmarks/LOG.md). Values stay, but for the
# order of the sum.

#: Of the largest kernel that XNNPACK has for them.
MOST_TAPS = 25


@WORKAROUNDS.on("conv2d")
def split_depthwise(node: fx.Node, write: AtenCalls) -> Any:
    """Replace ``node``, a convolution of images, if it is such a one and all sizes are known."""
    source, weight, bias, stride, padding, dilation, groups = arguments(node).values()
    image, kernel = source.meta["val"], weight.meta["val"]
    height, width = kernel.shape[-2:]
    if weight.op != "placeholder" or kernel.dtype is not torch.float32 or image.dim() != 4:
        return None
    if groups < 2 or groups != image.shape[1] or height * width <= MOST_TAPS:
        return None
    if not all(isinstance(size, int) for size in image.shape):
        return None
    padded = source
    if any(padding):
        around = [padding[-1], padding[-1], padding[0], padding[0]]
        padded = write.call(overload("constant_pad_nd"), source, around, 0.0)
    sizes = node.meta["val"].shape[-2:]
    parts: list[Any] = []
    for rows, columns in _tiles(height, width):
        part, window = padded, weight
        for axis, (start, end) in ((2, rows), (3, columns)):
            step, gap = stride[axis - 2], dilation[axis - 2]
            first = start * gap
            last = first + (sizes[axis - 2] - 1) * step + (end - 1 - start) * gap + 1
            part = _cut(write, part, axis, first, last)
            window = _cut(write, window, axis, start, end)
        own = bias if not parts else None
        parts.append(write.call(node.target, part, window, own, stride, [0, 0], dilation, groups))
    return reduce(write.add, parts)


def _cut(write: AtenCalls, value: Any, axis: int, start: int, end: int) -> Any:
    if (start, end) == (0, value.meta["val"].shape[axis]):
        return value
    return write.slice(value, axis, start, end)


def _tiles(height: int, width: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Rows and columns of parts of a window, of ``MOST_TAPS`` taps at most.

    >>> list(_tiles(7, 7))
    [((0, 3), (0, 7)), ((3, 6), (0, 7)), ((6, 7), (0, 7))]
    """
    columns = min(width, MOST_TAPS)
    rows = MOST_TAPS // columns
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            yield (top, min(top + rows, height)), (left, min(left + columns, width))
