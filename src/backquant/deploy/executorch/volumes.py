"""Convolutions of volumes (video, scans) as ones of images: ExecuTorch 1.5 has no kernel for them.

1. A convolution takes each step of its window in depth as further channels: of ``[n, c, d, h, w]`` it
   becomes one of images ``[n · d', c · depth of the window, h, w]``. Where windows lie side by side (the
   patches of video and vision-language models) nothing is copied twice. What is cut and moved are
   dequantized values, rounded with their own qparams again before the convolution: the same integers.
2. What stands between a convolution and its quantize node (``relu``, ``hardtanh``) stays there.
3. A transposed convolution makes the depth of its window as further channels where windows lie side by side
   in depth; elsewhere there are zeros between the images, read as in 1.
Values stay. At most one size may be free.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from backquant.deploy.edits import (
    AtenCalls,
    Rules,
    apply,
    arguments,
    before,
    first_only,
    operands,
    sizes_of,
)
from backquant.lower.qdq import is_channel_dequantize, is_dequantize, is_quantize
from backquant.operators import overload, overloads

#: The rules by operator.
VOLUMES = Rules()

# Maxima over axes, and pools, in the spelling of four dimensions that XNNPACK takes. Values stay.
#
# Source: ExecuTorch 1.5, ``backends/xnnpack/partition/config`` and ``operators/op_max_dim.py``.
#
# 1. The partitioner takes the largest values over any axis of four dimensions; the delegate refuses all but
#    ``max`` over axis 2 or 3 with ``keepdim=True``, and ``amax`` always. A maximum over neighbouring axes is
#    one over axis 2 of a view. Where a size is free that no view can say, or the axis itself, ``amax``
#    computes outside of the delegate, whose windows are of one size.
# 2. Pools of one dimension, and of images without a batch, run on views of four dimensions.
# 3. An adaptive pool whose sizes divide is one of that window: the others have no kernel in the delegate, and
#    those of maxima none at all.
# 4. The delegate has no ceil mode. Where the last window ends inside, the mode changes nothing (windows that
#    are larger than the image have been cut: ``operators.windows``). Others compute outside of the delegate.

_LARGEST, _LARGEST_AND_PLACES = overload("amax"), overload("max", "dim")


@VOLUMES.on(_LARGEST, _LARGEST_AND_PLACES)
def maximum(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 1."""
    source, axes, keep = arguments(node).values()
    value = source.meta["val"]
    has_places = node.target is _LARGEST_AND_PLACES
    rank = value.dim()
    axes = sorted(axis % max(rank, 1) for axis in ([axes] if has_places else axes or range(rank)))
    if value.dtype is not torch.float32 or not rank or (has_places and not first_only(node)):
        return None
    sizes = list(value.shape)
    low, high = axes[0], axes[-1] + 1
    four = [1, *(product(*part) for part in (sizes[:low], sizes[low:high], sizes[high:]))]
    result = (next(iter(node.users)) if has_places else node) if node.users else node
    wanted = sizes_of(result)
    if axes != list(range(low, high)) or not _can_be_viewed(four, wanted):
        return write.call(_LARGEST, source, axes, keep) if has_places else None
    view = write.reshape(source, four)
    largest = write.call(_LARGEST_AND_PLACES, view, 2, True)
    return write.reshape(write.call(operator.getitem, largest, 0), wanted)


def product(*sizes: Any) -> int:
    """Of sizes that are known; -1 where one is free: a symbol, or -1.

    >>> product(2, 3), product(2, -1)
    (6, -1)
    """
    is_known = all(isinstance(size, int) and size != -1 for size in sizes)
    return math.prod(sizes) if is_known else -1


def _can_be_viewed(four: list[int], wanted: list[Any]) -> bool:
    free = four.count(-1)
    return four[2] > 0 and free < 2 and 0 not in four and _is_known(wanted)


def _is_known(sizes: list[Any]) -> bool:
    """Whether a view can say them."""
    return all(isinstance(size, int) for size in sizes) and sizes.count(-1) < 2


@VOLUMES.on("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d")
def pool_of_one_dimension(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 2."""
    source, *windows = operands(node)
    sizes = sizes_of(source)
    name = str(node.target).split(".")[1].replace("1d", "2d")
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


def without_batch(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 2, of images of three dimensions."""
    source, *more = operands(node)
    sizes = sizes_of(source)
    if len(sizes) != 3 or not _is_known(sizes):
        return None
    made = write.call(node.target, write.reshape(source, [1, *sizes]), *more, **node.kwargs)
    return write.reshape(made, sizes_of(node))


@VOLUMES.on("max_pool2d", "avg_pool2d")
def pool_of_images(node: fx.Node, write: AtenCalls) -> Any:
    """Rules 4 and 2."""
    said = arguments(node)
    given = sizes_of(operands(node)[0])[-2:]
    if said["ceil_mode"] and _is_known(given) and -1 not in given:
        windows = said["kernel_size"], said["stride"] or said["kernel_size"], said["padding"]
        two = [_each(sizes, 2) for sizes in (*windows, said.get("dilation", 1))]
        if all(map(_ends_inside, given, *two)):
            said["ceil_mode"] = False
            node.args, node.kwargs = tuple(said.values()), {}
    return without_batch(node, write)


def _each(sizes: Any, axes: int) -> list[int]:
    found = [sizes] if isinstance(sizes, int) else list(sizes)
    return found * axes if len(found) == 1 else found


def _ends_inside(size: int, window: int, step: int, padding: int, dilation: int) -> bool:
    free = size + 2 * padding - dilation * (window - 1) - 1
    return free >= 0 and free % step == 0


_ADAPTIVE_MAXIMUM = overload("adaptive_max_pool2d")
_WINDOWS = {
    overload("adaptive_avg_pool2d"): overload("avg_pool2d"),
    _ADAPTIVE_MAXIMUM: overload("max_pool2d"),
}


@VOLUMES.on(*_WINDOWS)
def adaptive(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 3."""
    if node.target not in _WINDOWS:
        return None
    source, wanted = operands(node)
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


# Pools and resizing of volumes, as ones of their images and then of their depths.
#
# ExecuTorch 1.5 has no kernel for volumes. The largest value, the mean and interpolated values of a window
# are those along one axis after another. Values stay, but for the order of a sum. At most one size may be
# free.

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


@VOLUMES.on("max_pool3d", "avg_pool3d")
def pool(node: fx.Node, write: AtenCalls) -> Any:
    """``max_pool3d`` and ``avg_pool3d``."""
    said = arguments(node)
    if said.get("divisor_override") is not None:
        return None
    said["stride"] = said["stride"] or said["kernel_size"]
    windows = {name: _each(said[name], 3) for name in _NOTHING if name in said}
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


def _one_after_another(node: fx.Node, write: AtenCalls, of_images: _Call, of_depths: _Call) -> Any:
    """What the two calls make of the input of ``node``; ``None``, and nothing, if they cannot."""
    source, result = operands(node)[0], node
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


@VOLUMES.on("adaptive_avg_pool3d", "adaptive_max_pool3d")
def adaptive_pool(node: fx.Node, write: AtenCalls) -> Any:
    """``adaptive_avg_pool3d``, and ``adaptive_max_pool3d`` where nobody reads the places."""
    depth, *plane = operands(node)[1]
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


_RESIZES = {
    overload("upsample_nearest3d", "vec"): overload("upsample_nearest2d", "vec"),
    overload("upsample_trilinear3d", "vec"): overload("upsample_bilinear2d", "vec"),
}


@VOLUMES.on(*_RESIZES)
def resize(node: fx.Node, write: AtenCalls) -> Any:
    """``upsample_nearest3d`` and ``upsample_trilinear3d``."""
    _, sizes, *corners, factors = arguments(node).values()
    target = _RESIZES[node.target]

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


_BY_DEPTH = [0, 2, 1, 3, 4]  # samples and depths first, or back
_BETWEEN = frozenset({*overloads("relu"), *overloads("hardtanh")})
_TRANSPOSED = overload("conv_transpose2d", "input")
_MOVES = {overload(name) for name in ("contiguous", "permute", "reshape")}
_END = torch.iinfo(torch.int64).max


class _Moves(AtenCalls):
    """Calls that stand for no operator of the model: none is refused for what the delegate does not move."""

    def call(self, target: Any, *args: Any, **more: Any) -> Any:
        made = super().call(target, *args, **more)
        made.meta.pop("custom", None)
        return made


@VOLUMES.on("conv3d", "conv3d.padding")
def convolution(node: fx.Node, _: AtenCalls) -> None:
    """Rules 1 and 2, of ``conv3d``."""
    source, weight, bias, stride, padding, dilation, groups = arguments(node).values()
    kernel = weight.meta["val"].shape
    if node.kwargs or not can_be_viewed(node, source) or not _is_plain(weight):
        return
    write = _Moves(node)
    depth, step, gap = kernel[2], stride[0], dilation[0]
    around, flat = _paddings(padding, depth, gap)
    images = _pad(write, _by_depth(write, source), around)
    steps = _side_by_side(write, images, depth, step, gap)
    if steps is None:
        steps = _steps(write, images, depth, step, gap)
    image = _rounded(write, source, _flat(write, steps))
    window = _weight(write, weight, [kernel[0], kernel[1] * depth, *kernel[3:]])
    target = overload("conv2d", "padding") if isinstance(flat, str) else overload("conv2d")
    made = before(node, target, (image, window, bias, stride[1:], flat, dilation[1:], groups))
    _put_back(node, made)


def _paddings(padding: Any, depth: int, gap: int) -> tuple[tuple[int, int], Any]:
    """Of the depth at both ends, and of the image."""
    if padding == "valid":
        return (0, 0), padding
    if padding == "same":
        both = gap * (depth - 1)
        return (both // 2, both - both // 2), padding
    return (padding[0], padding[0]), list(padding[1:])


def _is_plain(weight: Any) -> bool:
    """Whether there are no scales, or one for each of the first axis, or one in all."""
    if is_channel_dequantize(weight):
        return bool(weight.args[3] == 0)
    return is_dequantize(weight) or not _is_integer(weight)


def _is_integer(weight: Any) -> bool:
    return getattr(weight.target, "namespace", "") in ("quantized_decomposed", "backquant")


def _by_depth(write: AtenCalls, source: Any) -> Any:
    """``[n, d, c, h, w]`` of ``[n, c, d, h, w]``, or of a volume without samples."""
    if source.meta["val"].dim() < _VOLUME:
        source = write.reshape(source, [1, *sizes_of(source)])
    if source.target is overload("contiguous") and list(source.args[0].args[1:]) == [_BY_DEPTH]:
        return source.args[0].args[0]  # what `_as_volume` has written
    return write.permute(source, _BY_DEPTH)


def _pad(write: AtenCalls, value: Any, around: tuple[int, int]) -> Any:
    if not any(around):
        return value
    return write.call(overload("constant_pad_nd"), value, [0, 0, 0, 0, 0, 0, *around], 0.0)


def _steps(write: AtenCalls, value: Any, depth: int, step: int, gap: int) -> Any:
    """``[n, d', c, depth, h, w]`` of ``[n, d, c, h, w]``: what each step of the window reads."""
    rows = _rows(write, value, depth, step, gap)
    sizes = sizes_of(rows[0])
    parts = [write.reshape(row, [*sizes[:2], *sizes[-3:-2], 1, *sizes[-2:]]) for row in rows]
    return parts[0] if depth == 1 else write.cat(parts, 3)


def _rows(write: AtenCalls, value: Any, depth: int, step: int, gap: int) -> list[Any]:
    """The depths that each step reads: the delegate has no slices that leave some out."""
    samples, size, *rest = sizes_of(value)
    lefts = [(depth - 1 - place) * gap for place in range(depth)]
    if step == 1 or size == -1:
        ends = [-left if left else _END for left in lefts]
        return [_cut(write, value, 1, i * gap, end, step) for i, end in enumerate(ends)]
    wanted = (size - lefts[0] - 1) // step + 1
    length = step * (lefts[0] // step + wanted)
    value = (
        _pad(write, value, (0, length - size))
        if length > size
        else _cut(write, value, 1, 0, length)
    )
    parted = write.reshape(value, [samples, length // step, step, *rest])
    rows = []
    for place in range(depth):
        first, inner = divmod(place * gap, step)
        row = _cut(write, parted, 1, first, first + wanted)
        rows.append(_cut(write, row, 2, inner, inner + 1))
    return rows


def _cut(write: AtenCalls, value: Any, axis: int, start: int, end: int, step: int = 1) -> Any:
    whole = end == _END or 0 < end == sizes_of(value)[axis]
    if (start, step) == (0, 1) and whole:
        return value
    return write.call(overload("slice"), value, axis, start, end, step)


def _side_by_side(write: AtenCalls, value: Any, depth: int, step: int, gap: int) -> Any:
    """The same as a view, where windows neither overlap nor leave anything out; None elsewhere."""
    sizes = sizes_of(value)
    if gap != 1 or depth == 1 or sizes[1] == -1 or sizes[1] % depth or sizes[1] != depth != step:
        return None
    cut = write.reshape(value, [sizes[0], sizes[1] // depth, depth, *sizes[2:]])
    return write.permute(cut, [0, 1, 3, 2, 4, 5])


def _rounded(write: AtenCalls, source: Any, image: Any) -> Any:
    """``image`` as integers of the qparams of ``source``, dequantized, where that comes from integers."""
    while source.target in _MOVES:
        source = source.args[0]
    if not is_dequantize(source):
        return image
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    return write.call(
        source.target, write.call(quantize, image, *source.args[1:]), *source.args[1:]
    )


def _weight(write: AtenCalls, weight: Any, sizes: list[int]) -> Any:
    if not _is_integer(weight):
        return write.reshape(weight, sizes)
    return write.call(weight.target, write.reshape(weight.args[0], sizes), *weight.args[1:])


def _put_back(node: fx.Node, made: Any) -> None:
    """Rule 2: let what reads ``node`` read ``made``, whose images are a volume's."""
    last = node
    while len(last.users) == 1:
        [user] = last.users
        if user.target not in _BETWEEN and not is_quantize(user):
            break
        made = before(user, user.target, (made, *user.args[1:]), **user.kwargs)
        last = user
        if is_quantize(user):
            break
    readers = [last]
    if is_quantize(last) and all(map(is_dequantize, last.users)):
        readers = list(last.users)
    for reader in readers:
        value = made
        if reader is not last:
            value = before(reader, reader.target, (made, *reader.args[1:]), **reader.kwargs)
        reader.replace_all_uses_with(_as_volume(reader, value))


def _as_volume(node: fx.Node, images: Any) -> Any:
    """``images``, ``[n · d, c, h, w]``, in the shape of ``node``."""
    write = _Moves(node)
    wanted = sizes_of(node)
    samples, channels, depth, *plane = wanted if len(wanted) == _VOLUME else [1, *wanted]
    value = write.reshape(images, [samples, depth, channels, *plane])
    value = write.contiguous(write.permute(value, _BY_DEPTH))  # views of it may follow
    return value if len(wanted) == _VOLUME else write.reshape(value, wanted)


@VOLUMES.on("conv_transpose3d.input")
def transposed(node: fx.Node, _: AtenCalls) -> Any:
    """Rule 3, of ``conv_transpose3d``."""
    source, weight, bias, stride, padding, more, groups, dilation = arguments(node).values()
    inner, outer, depth, *window = weight.meta["val"].shape
    first = (depth - 1) * dilation[0] - padding[0]
    if node.kwargs or not can_be_viewed(node, source) or _is_integer(weight) or first < 0:
        return None
    flat = (*(list(each[1:]) for each in (stride, padding, more)), groups, list(dilation[1:]))
    write = _Moves(node)
    images = _by_depth(write, source)
    if first == depth - 1 == stride[0] - 1 and not more[0]:
        kernel = write.reshape(weight, [inner, outer * depth, *window])
        if bias is not None:
            bias = write.call(overload("repeat_interleave", "self_int"), bias, depth)
        made = before(node, _TRANSPOSED, (_flat(write, images), kernel, bias, *flat))
        return _parted(write, made, depth, sizes_of(images)[:2], sizes_of(node))
    between = _between_zeros(write, images, stride[0], first, first + more[0])
    steps = _steps(write, between, depth, 1, dilation[0])
    turned = write.permute(write.call(overload("flip"), weight, [2]), [0, 2, 1, 3, 4])
    kernel = write.reshape(turned, [inner * depth, outer, *window])
    _put_back(node, before(node, _TRANSPOSED, (_flat(write, steps), kernel, bias, *flat)))
    return None


def _flat(write: AtenCalls, steps: Any) -> Any:
    """Samples and depths as one axis, channels and what a step reads as one."""
    sizes = sizes_of(steps)
    channels, *plane = sizes[2:] if len(sizes) == _VOLUME else (product(*sizes[2:4]), *sizes[4:])
    return write.reshape(steps, [product(*sizes[:2]), channels, *plane])


def _parted(write: AtenCalls, made: Any, depth: int, leading: list[Any], wanted: list[Any]) -> Any:
    """The volume of images ``[n · d, channels · depth, h, w]``."""
    channels, plane = sizes_of(made)[1] // depth, sizes_of(made)[2:]
    parted = write.reshape(made, [*leading, channels, depth, *plane])
    return write.reshape(write.permute(parted, [0, 2, 1, 3, 4, 5]), wanted)


def _between_zeros(write: AtenCalls, images: Any, step: int, start: int, end: int) -> Any:
    """``step - 1`` images of zeros between two, ``start`` in front and ``end`` behind."""
    if step > 1:
        sizes = sizes_of(images)
        around = [0, 0, 0, 0, 0, 0, 0, step - 1]
        parted = write.call(overload("constant_pad_nd"), write.unsqueeze(images, 2), around, 0.0)
        images = write.reshape(parted, [sizes[0], product(sizes[1], step), *sizes[2:]])
        images = _cut(write, images, 1, 0, 1 - step)
    return _pad(write, images, (start, end))
