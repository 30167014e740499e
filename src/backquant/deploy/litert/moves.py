"""Operators that move values: reshapes, permutations, slices, joins, padding.

1. Permutations change the layout alone. Reshapes keep it where the values can stay where they are.
2. A flattened image that only linear layers read stays with its channels last: their weights are
   reordered instead.
3. Items of a split are slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from backquant.deploy.edits import overload_named
from backquant.deploy.litert.emitter import (
    CHANNELS_LAST,
    Call,
    Constant,
    Layout,
    Table,
    UnsupportedError,
    Value,
    always,
    constant_tensor,
    hints,
    ordered_for,
    permuted,
    plain,
    reshaped,
    stored,
    without,
)
from backquant.deploy.litert.network import Array, Free, Tensor, has_free

_END = (1 << 31) - 1
TABLE = Table()


@TABLE.moves("view reshape reshape_as _unsafe_view flatten.using_ints unflatten.int")
def _reshape(call: Call) -> Value:
    value, wanted = call.source, call.shape
    layout = reshaped(value.shape, value.layout, wanted)
    if layout is None and call.columns_allowed:
        columns = _columns(value, wanted)
        if columns is not None:
            made = _shaped(call, value.tensor, plain(len(wanted)))
            return Value(made.tensor, made.layout, columns)
    if layout is None:
        ordered = ordered_for(value.shape, value.layout, wanted)
        value = Value(call.emitter.laid(value, ordered), ordered)
        layout = reshaped(value.shape, ordered, wanted)
        assert layout is not None
    return _shaped(call, value.tensor, layout)


def _shaped(call: Call, tensor: Tensor, layout: Layout) -> Value:
    shape = stored(call.shape, layout)
    if sum(isinstance(size, Free) for size in shape) > 1:
        raise UnsupportedError("a reshape with two free sizes")
    return Value(call.emitter.reshape(tensor, shape), layout)


def _columns(value: Value, wanted: Sequence[int]) -> Array | None:
    """Rule 2: where the columns of an image, flattened behind its first axis, come from."""
    if len(wanted) != 2 or value.layout[0] != 0 or value.shape[0] != wanted[0]:
        return None
    sizes = value.shape[1:]
    places = np.arange(int(np.prod(sizes))).reshape(sizes)
    return np.transpose(places, [axis - 1 for axis in value.layout[1:]]).reshape(-1)


@TABLE.moves("squeeze.default squeeze.dim squeeze.dims")
def _squeezed(call: Call) -> Value:
    """Axes of size 1 go, wherever they lie."""
    value, given = call.source, call.arg("dim")
    rank = len(value.shape)
    axes = range(rank) if given is None else [given] if isinstance(given, int) else given
    gone = [axis % rank for axis in axes if value.shape[axis % rank] == 1]
    return _shaped(call, value.tensor, without(value.layout, gone))


@TABLE.moves("unsqueeze")
def _unsqueezed(call: Call) -> Value:
    value = call.source
    rank = len(value.shape)
    axis = call.arg("dim") % (rank + 1)
    layout = (*(a + (a >= axis) for a in value.layout),)
    place = axis if value.layout == plain(rank) else rank
    return _shaped(call, value.tensor, (*layout[:place], axis, *layout[place:]))


def _permuted(call: Call, order: Sequence[int]) -> Value:
    value = call.source
    axes = [axis % len(value.shape) for axis in order]
    return Value(value.tensor, permuted(value.layout, axes))


@TABLE.moves("permute")
def _in_order(call: Call) -> Value:
    return _permuted(call, call.arg("dims"))


@TABLE.moves("t numpy_T")
def _turned(call: Call) -> Value:
    return _permuted(call, range(len(call.source.shape))[::-1])


@TABLE.moves("transpose.int swapaxes")
def _swapped(call: Call) -> Value:
    order = list(range(len(call.source.shape)))
    one, two = (call.arg(f"dim{i}", call.arg(f"axis{i}")) for i in (0, 1))
    order[one], order[two] = order[two], order[one]
    return _permuted(call, order)


@TABLE.moves("movedim.int movedim.intlist")
def _moved(call: Call) -> Value:
    rank = len(call.source.shape)
    sources, places = (
        [each % rank for each in ([given] if isinstance(given, int) else given)]
        for given in (call.arg("source"), call.arg("destination"))
    )
    rest = iter(axis for axis in range(rank) if axis not in sources)
    target = dict(zip(places, sources, strict=True))
    return _permuted(call, [target[i] if i in target else next(rest) for i in range(rank)])


# -- slices -------------------------------------------------------------------------------------------


def _cut(call: Call, value: Value, axis: int, start: int, step: int = 1) -> Value:
    """A slice along one axis, to the sizes of the result."""
    place = value.layout.index(axis)
    made = call.output(value.layout)
    stop = start + (made.shape[place] - 1) * step + 1
    whole = isinstance(made.shape[place], Free)
    return _strided(call, value, made, (axis, start, stop, step), endMask=int(whole) << place)


def _item(call: Call, value: Value, axis: int, index: int) -> Value:
    """One slice without its axis."""
    layout = without(value.layout, [axis])
    mask = 1 << value.layout.index(axis)
    made = call.output(layout)
    bounds = (axis, index, index + 1, 1)
    return _strided(call, value, made, bounds, layout, shrinkAxisMask=mask)


def _strided(
    call: Call,
    value: Value,
    made: Tensor,
    bounds: tuple[int, int, int, int],
    layout: Layout | None = None,
    **masks: int,
) -> Value:
    """``bounds``: an axis, its start, end and step; the other axes are whole."""
    axis, start, stop, step = bounds
    rank, place = len(value.layout), value.layout.index(axis)
    begin, end, steps = [0] * rank, list(value.tensor.shape), [1] * rank
    begin[place], end[place], steps[place] = start, stop, step
    lists = [
        call.emitter.integers(each, name)
        for each, name in ((begin, "begin"), (end, "end"), (steps, "strides"))
    ]
    mask = sum(1 << i for i in range(rank) if i != place) | masks.pop("endMask", 0)
    inputs = (value.tensor, *lists)
    call.emitter.emit("STRIDED_SLICE", inputs, made, beginMask=0, endMask=mask, **masks)
    return Value(made, value.layout if layout is None else layout)


@TABLE.moves("slice.Tensor")
def _slice(call: Call) -> Value:
    value = call.source
    axis = call.arg("dim", 0) % len(value.shape)
    size = value.shape[axis]
    start = call.arg("start", 0)
    start = min(max(start + size if start < 0 else start, 0), size)
    step = call.arg("step", 1)
    if call.shape == value.shape and step == 1:
        return value
    if isinstance(call.shape[axis], Free) and call.arg("end", _END) < size:
        raise UnsupportedError("a slice of a free size that ends before its end")
    return _cut(call, value, axis, start, step)


@TABLE.moves("narrow")
def _narrow(call: Call) -> Value:
    if isinstance(call.shape[call.arg("dim")], Free):
        raise UnsupportedError("a part of a free size")
    return _slice(call)


@TABLE.moves("select.int")
def _selected(call: Call) -> Value:
    value = call.source
    axis = call.arg("dim") % len(value.shape)
    index = call.arg("index")
    return _item(call, value, axis, index + value.shape[axis] if index < 0 else index)


def _part(call: Call, source: fx.Node, index: int) -> Value:
    """Rule 3."""
    value = call.read("self")
    axis = hints(call.args["dim"]) % len(value.shape)
    if source.target is overload_named("unbind.int"):
        return _item(call, value, axis, index)
    before = (hints(source.meta["val"][place].shape[axis]) for place in range(index))
    return _cut(call, value, axis, sum(before))


_SPLITS = "split.Tensor split_with_sizes split.sizes chunk unbind.int tensor_split.sections"
#: Operators of several results: how an item of theirs is written, for a call with their arguments.
PARTS: dict[Any, Callable[[Call, fx.Node, int], Value]] = dict.fromkeys(
    map(overload_named, _SPLITS.split()), _part
)


# -- joins, padding, repetition -----------------------------------------------------------------------


@TABLE.moves("cat")
def _cat(call: Call) -> Value:
    values = [call.read_argument(each, call.scales) for each in call.args["tensors"]]
    values = [value for value in values if value.shape != (0,)]
    rank = len(call.shape)
    axis = call.arg("dim", 0) % rank
    layout = next((v.layout for v in values if v.layout != plain(rank)), plain(rank))
    tensors = [call.emitter.laid(value, layout) for value in values]
    return call.emit("CONCATENATION", tensors, layout, axis=layout.index(axis))


@TABLE.moves("stack")
def _stack(call: Call) -> Value:
    rank = len(call.shape)
    values = [call.read_argument(each, call.scales) for each in call.args["tensors"]]
    tensors = [call.emitter.laid(value, plain(rank - 1)) for value in values]
    axis = call.arg("dim", 0) % rank
    return call.emit("PACK", tensors, axis=axis, valuesCount=len(tensors))


@TABLE.rule("pad constant_pad_nd", always, keeps=True)
def _padded(call: Call) -> Value:
    value = call.source
    mode, amount = call.arg("mode", "constant"), call.arg("value", 0.0) or 0.0
    rank, given = len(value.shape), list(call.arg("pad"))
    rows = [(0, 0)] * rank
    for index in range(len(given) // 2):
        rows[rank - 1 - index] = (given[2 * index], given[2 * index + 1])
    if any(each < 0 for row in rows for each in row):
        raise UnsupportedError("a negative padding")
    table = call.emitter.pairs([rows[axis] for axis in value.layout])
    if mode == "reflect":
        return call.emit("MIRROR_PAD", (value.tensor, table), value.layout, mode=0)
    if mode != "constant":
        return _padded_with_own(call, value, rows, mode)
    if amount == 0.0:
        return call.emit("PAD", (value.tensor, table), value.layout)
    dtype = call.dtype if call.integer else ""
    number = call.emitter.constant(Constant("padding", torch.tensor([amount])), call.scales, dtype)
    return call.emit("PADV2", (value.tensor, table, number.tensor), value.layout)


def _padded_with_own(call: Call, value: Value, rows: Sequence[tuple[int, int]], mode: str) -> Value:
    """Places of the input taken again: the nearest (``replicate``), or those of the other end
    (``circular``)."""
    tensor = value.tensor
    for axis, (before, after) in enumerate(rows):
        if not (before or after):
            continue
        place, size = value.layout.index(axis), value.shape[axis]
        if isinstance(size, Free):
            raise UnsupportedError(f"padding {mode!r} of a free size")
        places = np.arange(-before, size + after)
        places = places % size if mode == "circular" else places.clip(0, size - 1)
        shape = [len(places) if i == place else n for i, n in enumerate(tensor.shape)]
        made = call.emitter.like(tensor, shape)
        tensor = call.emitter.emit("GATHER", (tensor, _places(places)), made, axis=place)
    return Value(tensor, value.layout)


def _places(of: Any, name: str = "places") -> Tensor:
    return constant_tensor(name, np.asarray(of).astype(np.int32))


def _in_turn(count: int, parts: int) -> Array:
    """The order in which the first of each of ``parts`` comes first, then the second of each."""
    order: Array = np.arange(count).reshape(parts, -1).T.reshape(-1)
    return order


@TABLE.moves("channel_shuffle")
def _shuffled_groups(call: Call) -> Value:
    value = call.source
    index = _places(_in_turn(value.shape[1], call.arg("groups")), "channels")
    return call.emit("GATHER", (value.tensor, index), value.layout, axis=value.layout.index(1))


@TABLE.moves("expand expand_as")
def _expand(call: Call) -> Value:
    value = call.emitter.widened(call.source, len(call.shape))
    if value.shape == call.shape:
        return value
    if has_free(call.shape):
        raise UnsupportedError("an expansion to a free size")
    made = call.output(value.layout)
    call.emitter.emit("BROADCAST_TO", (value.tensor, call.emitter.integers(made.shape)), made)
    return Value(made, value.layout)


@TABLE.moves("repeat")
def _repeat(call: Call) -> Value:
    counts = list(call.arg("repeats"))
    value = call.emitter.widened(call.source, len(counts))
    multiples = call.emitter.integers(stored(counts, value.layout), "multiples")
    return call.emit("TILE", (value.tensor, multiples), value.layout)


@TABLE.moves("flip")
def _flip(call: Call) -> Value:
    """One operator for each axis: of several, the kernel takes neighbours only."""
    value = call.source
    tensor = value.tensor
    for axis in call.arg("dims"):
        place = call.emitter.integers([value.layout.index(axis % len(value.shape))], "axis")
        tensor = call.emitter.same("REVERSE_V2", tensor, place)
    return Value(tensor, value.layout)


@TABLE.moves("index_select")
def _gather(call: Call) -> Value:
    value = call.source
    axis = call.arg("dim") % len(value.shape)
    places = call.emitter.laid(call.floats(call.held(call.args["index"])), (0,))
    return call.emit("GATHER", (value.tensor, places), value.layout, axis=value.layout.index(axis))


@TABLE.moves("index.Tensor")
def _indexed(call: Call) -> Value:
    """``x[:, i, j]``."""
    value = call.source
    one_axis_each: list[Any] = []
    for index in call.args["indices"]:
        held = None if index is None else call.held(index)
        parts: list[Any] = [held]
        if held is not None and _is_mask(held):
            parts = [Constant("places", part) for part in held.value.nonzero(as_tuple=True)]
        one_axis_each += parts
    made = {
        axis: _counted_up(call, value, axis, held)
        for axis, held in enumerate(one_axis_each)
        if held is not None
    }
    if len(made) > 1:
        return _taken_at(call, value, made)
    [(axis, places)] = made.items()
    return _taken_along(call, value, axis, places, range(axis, axis + len(places.shape)))


def _is_mask(held: Any) -> bool:
    if isinstance(held, Constant):
        return held.value.dtype in (torch.bool, torch.uint8)
    if held.tensor.dtype in ("BOOL", "UINT8"):
        raise UnsupportedError("a mask that is computed, which takes any number of values")
    return False


def _counted_up(call: Call, value: Value, axis: int, index: Any) -> Tensor:
    """Indices along one axis; PyTorch counts negative ones from its end."""
    size, is_free = value.shape[axis], isinstance(value.shape[axis], Free)
    if isinstance(index, Constant):
        if is_free and bool((index.value < 0).any()):
            raise UnsupportedError("a negative index along a free size")
        return _places(torch.where(index.value < 0, index.value + int(size), index.value))
    if is_free:
        raise UnsupportedError("an index along a free size that may be negative")
    tensor = call.emitter.laid(index, plain(len(index.shape)))
    sizes = constant_tensor("size", np.array(size, tensor.dtype.lower()))
    return call.emitter.same("FLOOR_MOD", tensor, sizes)


def _taken_along(
    call: Call, value: Value, axis: int, places: Tensor, given: Sequence[int]
) -> Value:
    """Values at ``places`` of one axis, whose axes are those of the result that are ``given``."""
    others = iter(each for each in range(len(call.shape)) if each not in given)
    names = {each: next(others) for each in range(len(value.shape)) if each != axis}
    place = value.layout.index(axis)
    before, after = (
        [names[each] for each in part] for part in (value.layout[:place], value.layout[place + 1 :])
    )
    return call.emit("GATHER", (value.tensor, places), (*before, *given, *after), axis=place)


def _taken_at(call: Call, value: Value, indices: dict[int, Tensor]) -> Value:
    """Values at points along several axes: those of the points are where the first of neighbours was, else
    at the front."""
    axes, rank = list(indices), len(value.shape)
    rest = [axis for axis in value.layout if axis not in indices]
    points = _points(call, list(indices.values()))
    count = len(points.shape) - 1
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    others = iter(
        each for each in range(rank - len(axes) + count) if not first <= each < first + count
    )
    names = dict(zip(sorted(rest), others, strict=True))
    tensor = call.emitter.laid(value, (*axes, *rest))
    layout = (*range(first, first + count), *(names[axis] for axis in rest))
    return call.emit("GATHER_ND", (tensor, points), layout)


def _points(call: Call, indices: list[Tensor]) -> Tensor:
    """Indices of several axes side by side, on a new last axis."""
    shape = np.broadcast_shapes(*(each.shape for each in indices))
    if any(has_free(each.shape) for each in indices):
        raise UnsupportedError("indices of a free size along several axes")
    data = [each.data for each in indices if each.data is not None]
    if len(data) == len(indices):
        arrays = [np.broadcast_to(each, shape) for each in data]
        return constant_tensor("points", np.stack(arrays, -1))
    emitter, parts = call.emitter, []
    sizes = emitter.integers(shape)
    for each in indices:
        made = each
        if made.dtype != "INT32":
            made = emitter.emit("CAST", (made,), emitter.like(made, dtype="INT32"))
        if made.shape != shape:
            made = emitter.emit("BROADCAST_TO", (made, sizes), emitter.like(made, shape))
        parts.append(made)
    together = emitter.like(parts[0], (*shape, len(parts)))
    return emitter.emit("PACK", parts, together, axis=len(shape), valuesCount=len(parts))


@TABLE.moves("gather")
def _gathered(call: Call) -> Value:
    """``torch.gather``: an index along one axis, along the others each place."""
    value, rank = call.source, len(call.shape)
    if has_free(call.shape):
        raise UnsupportedError("a gather of a free size")
    indices = {
        axis: _places(np.arange(size).reshape(-1, *(1,) * (rank - axis - 1)))
        for axis, size in enumerate(call.shape)
    }
    axis = call.arg("dim") % rank
    indices[axis] = _counted_up(call, value, axis, call.held(call.args["index"]))
    return _taken_at(call, value, indices)


@TABLE.moves("unfold")
def _windows(call: Call) -> Value:
    """``unfold``: windows along an axis, whose values lie on a new last axis."""
    value, rank = call.source, len(call.shape)
    axis = call.arg("dimension") % (rank - 1)
    if isinstance(value.shape[axis], Free):
        raise UnsupportedError("windows of a free size")
    starts = np.arange(call.shape[axis])[:, None] * call.arg("step")
    return _taken_along(
        call, value, axis, _places(starts + np.arange(call.shape[-1])), (axis, rank - 1)
    )


def _of_images(call: Call) -> Tensor:
    value = call.source
    if len(value.shape) != 4:
        raise UnsupportedError(f"a shuffle of {len(value.shape)} axes")
    return call.emitter.laid(value, CHANNELS_LAST)


@TABLE.moves("pixel_shuffle")
def _shuffled(call: Call) -> Value:
    """PyTorch orders the channels of a block before its places, the format after."""
    tensor, factor = _of_images(call), call.arg("upscale_factor")
    channels = tensor.shape[3]
    outputs = channels // factor**2
    if outputs > 1:
        places = _places(_in_turn(channels, outputs), "order")
        tensor = call.emitter.same("GATHER", tensor, places, axis=3)
    return call.emit("DEPTH_TO_SPACE", (tensor,), CHANNELS_LAST, blockSize=factor)


@TABLE.moves("pixel_unshuffle")
def _unshuffled(call: Call) -> Value:
    tensor, factor = _of_images(call), call.arg("downscale_factor")
    if tensor.shape[3] == 1:
        return call.emit("SPACE_TO_DEPTH", (tensor,), CHANNELS_LAST, blockSize=factor)
    out = call.output(CHANNELS_LAST)
    blocks = call.emitter.emit(
        "SPACE_TO_DEPTH", (tensor,), call.emitter.like(out), blockSize=factor
    )
    places = _places(_in_turn(out.shape[3], factor**2), "order")
    return Value(call.emitter.emit("GATHER", (blocks, places), out, axis=3), CHANNELS_LAST)
