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

from typing import Any

import torch

from backquant.deploy.edits import AtenCalls, Rule, before, sizes_of
from backquant.deploy.executorch.volume_pools import can_be_viewed, product
from backquant.lower.qdq import is_channel_dequantize, is_dequantize, is_quantize
from backquant.operators import overload, overloads

__all__ = ["VOLUMES"]

_VOLUME = 5  # axes: sample, channels, depth, rows, columns
_BY_DEPTH = [0, 2, 1, 3, 4]  # samples and depths first, or back
_BETWEEN = frozenset({*overloads("relu"), *overloads("hardtanh")})
_TRANSPOSED = overload("conv_transpose2d", "input")
_CONV, _PADDED_BY_NAME = overload("conv3d"), overload("conv3d", "padding")
_MOVES = {overload(name) for name in ("contiguous", "permute", "reshape")}
_END = torch.iinfo(torch.int64).max


class _Moves(AtenCalls):
    """Calls that stand for no operator of the model: none is refused for what the delegate does not move."""

    def call(self, target: Any, *args: Any, **more: Any) -> Any:
        made = super().call(target, *args, **more)
        made.meta.pop("custom", None)
        return made


def convolution(node: Any, _: AtenCalls) -> None:
    """Rules 1 and 2, of ``conv3d``."""
    given = (*node.args, *(None, [1] * 3, [0] * 3, [1] * 3, 1)[len(node.args) - 2 :])
    source, weight, bias, stride, padding, dilation, groups = given
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


def _put_back(node: Any, made: Any) -> None:
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


def _as_volume(node: Any, images: Any) -> Any:
    """``images``, ``[n · d, c, h, w]``, in the shape of ``node``."""
    write = _Moves(node)
    wanted = sizes_of(node)
    samples, channels, depth, *plane = wanted if len(wanted) == _VOLUME else [1, *wanted]
    value = write.reshape(images, [samples, depth, channels, *plane])
    value = write.contiguous(write.permute(value, _BY_DEPTH))  # views of it may follow
    return value if len(wanted) == _VOLUME else write.reshape(value, wanted)


def transposed(node: Any, _: AtenCalls) -> Any:
    """Rule 3, of ``conv_transpose3d``."""
    given = (*node.args, *(None, [1] * 3, [0] * 3, [0] * 3, 1, [1] * 3)[len(node.args) - 2 :])
    source, weight, bias, stride, padding, more, groups, dilation = given
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


#: The rules by operator.
VOLUMES: dict[Any, Rule] = {
    _CONV: convolution,
    _PADDED_BY_NAME: convolution,
    overload("conv_transpose3d", "input"): transposed,
}
