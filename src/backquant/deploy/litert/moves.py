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

from backquant.deploy.litert.emitter import Call, Rule, Table
from backquant.deploy.litert.lowered_values import (
    Constant,
    Layout,
    UnsupportedError,
    Value,
    constant_tensor,
    hints,
    ordered_for,
    permuted,
    plain,
    reshaped,
    stored,
    without,
)
from backquant.deploy.litert.network import Array, Tensor
from backquant.operators import overload

_END = (1 << 31) - 1


def _source(call: Call) -> Value:
    return call.read("input" if "input" in call.args else "self")


def _reshape(call: Call) -> Value:
    value = _source(call)
    wanted = call.shape
    layout = reshaped(value.shape, value.layout, wanted)
    if layout is None and call.columns_allowed:
        columns = _columns(value, wanted)
        if columns is not None:
            tensor = _shaped(call, value.tensor, plain(len(wanted)))
            return Value(tensor, plain(len(wanted)), columns)
    if layout is None:
        ordered = ordered_for(value.shape, value.layout, wanted)
        value = Value(call.emitter.laid(value, ordered), ordered)
        layout = reshaped(value.shape, ordered, wanted)
        assert layout is not None
    return Value(_shaped(call, value.tensor, layout), layout)


def _shaped(call: Call, tensor: Tensor, layout: Layout) -> Tensor:
    signature = stored(call.signature, layout)
    if signature.count(-1) > 1:
        raise UnsupportedError("a reshape with two free sizes")
    return call.emitter.reshape(tensor, stored(call.shape, layout), signature)


def _columns(value: Value, wanted: Sequence[int]) -> Array | None:
    """Rule 2: where the columns of an image, flattened behind its first axis, come from."""
    if len(wanted) != 2 or value.layout[0] != 0 or value.shape[0] != wanted[0]:
        return None
    sizes = value.shape[1:]
    places = np.arange(int(np.prod(sizes))).reshape(sizes)
    return np.transpose(places, [axis - 1 for axis in value.layout[1:]]).reshape(-1)


def _squeezed(axes_of: Callable[[Call], Sequence[int]]) -> Callable[[Call], Value]:
    """Axes of size 1 go, wherever they lie."""

    def write(call: Call) -> Value:
        value = _source(call)
        gone = [axis % len(value.shape) for axis in axes_of(call)]
        gone = [axis for axis in gone if value.shape[axis] == 1]
        layout = without(value.layout, gone)
        return Value(_shaped(call, value.tensor, layout), layout)

    return write


def _unsqueezed(call: Call) -> Value:
    value = _source(call)
    axis = call.arg("dim") % (len(value.shape) + 1)
    layout = (*(a + (a >= axis) for a in value.layout),)
    place = min(axis, len(layout)) if value.layout == plain(len(value.shape)) else len(layout)
    layout = (*layout[:place], axis, *layout[place:])
    return Value(_shaped(call, value.tensor, layout), layout)


def _permuted(order_of: Callable[[Call, int], Sequence[int]]) -> Callable[[Call], Value]:
    def write(call: Call) -> Value:
        value = _source(call)
        rank = len(value.shape)
        order = [axis % rank for axis in order_of(call, rank)]
        return Value(value.tensor, permuted(value.layout, order))

    return write


def _swapped(call: Call, rank: int, names: tuple[str, str] = ("dim0", "dim1")) -> list[int]:
    order = list(range(rank))
    one, two = (call.arg(name) % rank for name in names)
    order[one], order[two] = order[two], order[one]
    return order


def _moved(call: Call, rank: int) -> list[int]:
    sources, places = (
        [each % rank for each in ([given] if isinstance(given, int) else given)]
        for given in (call.arg("source"), call.arg("destination"))
    )
    rest = iter(axis for axis in range(rank) if axis not in sources)
    target = dict(zip(places, sources, strict=True))
    return [target[i] if i in target else next(rest) for i in range(rank)]


# -- slices -------------------------------------------------------------------------------------------


def _cut(call: Call, value: Value, axis: int, start: int, step: int = 1) -> Value:
    """A slice along one axis, to the sizes of the result."""
    layout = value.layout
    rank, place = len(layout), layout.index(axis)
    made = call.output(layout)
    begin, steps = [0] * rank, [1] * rank
    begin[place], steps[place] = start, step
    stop = start + (made.shape[place] - 1) * step + 1
    end = [stop if i == place else size for i, size in enumerate(value.tensor.shape)]
    mask = sum(1 << i for i in range(rank) if i != place)
    free = made.signature[place] == -1
    if free:
        mask |= 1 << place
    lists = [
        call.emitter.integers(each, name)
        for each, name in ((begin, "begin"), (end, "end"), (steps, "strides"))
    ]
    call.emitter.emit("STRIDED_SLICE", (value.tensor, *lists), made, beginMask=0, endMask=mask)
    return Value(made, layout)


def _slice(call: Call) -> Value:
    value = _source(call)
    axis = call.arg("dim", 0) % len(value.shape)
    size = value.shape[axis]
    start = call.arg("start", 0)
    start = min(max(start + size if start < 0 else start, 0), size)
    step = call.arg("step", 1)
    if call.shape == value.shape and step == 1:
        return value
    if call.signature[axis] == -1 and call.arg("end", _END) < size:
        raise UnsupportedError("a slice of a free size that ends before its end")
    return _cut(call, value, axis, start, step)


def _selected(call: Call) -> Value:
    value = _source(call)
    axis = call.arg("dim") % len(value.shape)
    index = call.arg("index")
    index = index + value.shape[axis] if index < 0 else index
    return _item(call, value, axis, index)


def _item(call: Call, value: Value, axis: int, index: int) -> Value:
    """One slice without its axis."""
    layout, place = value.layout, value.layout.index(axis)
    tensor, rank = value.tensor, len(value.layout)
    begin, end = [0] * rank, list(tensor.shape)
    begin[place], end[place] = index, index + 1
    made = call.output(without(layout, [axis]))
    lists = [
        call.emitter.integers(each, name)
        for each, name in ((begin, "begin"), (end, "end"), ([1] * rank, "strides"))
    ]
    mask = sum(1 << i for i in range(rank) if i != place)
    call.emitter.emit(
        "STRIDED_SLICE",
        (tensor, *lists),
        made,
        endMask=mask,
        beginMask=0,
        shrinkAxisMask=1 << place,
    )
    return Value(made, without(layout, [axis]))


def _part(call: Call, source: fx.Node, index: int) -> Value:
    """Rule 3."""
    value = call.read("self")
    axis = hints(call.args["dim"]) % len(value.shape)
    if source.target is overload("unbind", "int"):
        return _item(call, value, axis, index)
    before = (hints(source.meta["val"][place].shape[axis]) for place in range(index))
    return _cut(call, value, axis, sum(before))


#: Operators of several results: how an item of theirs is written, for a call with their arguments.
PARTS: dict[Any, Callable[[Call, fx.Node, int], Value]] = dict.fromkeys(
    (
        overload("split", "Tensor"),
        overload("split_with_sizes"),
        overload("split", "sizes"),
        overload("chunk"),
        overload("unbind", "int"),
        overload("tensor_split", "sections"),
    ),
    _part,
)


# -- joins, padding, repetition -----------------------------------------------------------------------


def _cat(call: Call) -> Value:
    values = [call.read_argument(each, call.scales) for each in call.args["tensors"]]
    values = [value for value in values if value.shape != (0,)]
    rank = len(call.shape)
    axis = call.arg("dim", 0) % rank
    layout = next((v.layout for v in values if v.layout != plain(rank)), plain(rank))
    tensors = [call.emitter.laid(value, layout) for value in values]
    return call.emit("CONCATENATION", tensors, layout, axis=layout.index(axis))


def _stack(call: Call) -> Value:
    rank = len(call.shape)
    values = [call.read_argument(each, call.scales) for each in call.args["tensors"]]
    tensors = [call.emitter.laid(value, plain(rank - 1)) for value in values]
    axis = call.arg("dim", 0) % rank
    return call.emit("PACK", tensors, axis=axis, valuesCount=len(tensors))


def _constant_pad(call: Call) -> Value:
    value = _source(call)
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
        if value.signature[axis] == -1:
            raise UnsupportedError(f"padding {mode!r} of a free size")
        places = np.arange(-before, size + after)
        places = places % size if mode == "circular" else places.clip(0, size - 1)
        shape = [len(places) if i == place else n for i, n in enumerate(tensor.shape)]
        index = constant_tensor("places", places.astype(np.int32))
        tensor = call.emitter.emit(
            "GATHER", (tensor, index), call.emitter.like(tensor, shape), axis=place
        )
    return Value(tensor, value.layout)


def _shuffled_groups(call: Call) -> Value:
    value = _source(call)
    groups, channels = call.arg("groups"), value.shape[1]
    order = np.arange(channels).reshape(groups, -1).T.reshape(-1)
    index = constant_tensor("channels", order.astype(np.int32))
    return call.emit("GATHER", (value.tensor, index), value.layout, axis=value.layout.index(1))


def _expand(call: Call) -> Value:
    value = _source(call)
    rank = len(call.shape)
    missing = rank - len(value.shape)
    if missing:
        ones, tensor = (1,) * missing, call.emitter.laid(value, plain(len(value.shape)))
        wide = call.emitter.reshape(tensor, (*ones, *tensor.shape), (*ones, *tensor.signature))
        value = Value(wide, plain(rank))
    if value.shape == call.shape:
        return value
    if -1 in call.signature:
        raise UnsupportedError("an expansion to a free size")
    made = call.output(value.layout)
    sizes = call.emitter.integers(made.shape)
    call.emitter.emit("BROADCAST_TO", (value.tensor, sizes), made)
    return Value(made, value.layout)


def _repeat(call: Call) -> Value:
    value = _source(call)
    counts = list(call.arg("repeats"))
    missing = len(counts) - len(value.shape)
    if missing:
        ones, tensor = (1,) * missing, call.emitter.laid(value, plain(len(value.shape)))
        wide = call.emitter.reshape(tensor, (*ones, *tensor.shape), (*ones, *tensor.signature))
        value = Value(wide, plain(len(counts)))
    multiples = call.emitter.integers(stored(counts, value.layout), "multiples")
    return call.emit("TILE", (value.tensor, multiples), value.layout)


def _flip(call: Call) -> Value:
    """One operator for each axis: of several, the kernel takes neighbours only."""
    value = _source(call)
    tensor = value.tensor
    for axis in call.arg("dims"):
        place = call.emitter.integers([value.layout.index(axis % len(value.shape))], "axis")
        made = call.emitter.like(tensor, tensor.shape, signature=tensor.signature)
        tensor = call.emitter.emit("REVERSE_V2", (tensor, place), made)
    return Value(tensor, value.layout)


def _gather(call: Call) -> Value:
    value = _source(call)
    rank = len(value.shape)
    axis = call.arg("dim") % rank
    places = call.emitter.laid(call.floats(call.held(call.args["index"])), (0,))
    return call.emit("GATHER", (value.tensor, places), value.layout, axis=value.layout.index(axis))


def _indexed(call: Call) -> Value:
    """``x[:, i, j]``."""
    value = _source(call)
    indices: dict[int, Any] = {}
    axis = 0
    for each in call.args["indices"]:
        held = None if each is None else call.held(each)
        if held is not None and _is_mask(held):
            for places in held.value.nonzero(as_tuple=True):
                indices[axis] = Constant("places", places)
                axis += 1
            continue
        if held is not None:
            indices[axis] = held
        axis += 1
    made = {axis: _counted_up(call, value, axis, each) for axis, each in indices.items()}
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
    size, is_free = value.shape[axis], value.signature[axis] == -1
    if isinstance(index, Constant):
        if is_free and bool((index.value < 0).any()):
            raise UnsupportedError("a negative index along a free size")
        places = torch.where(index.value < 0, index.value + size, index.value)
        return constant_tensor("places", places.numpy().astype(np.int32))
    if is_free:
        raise UnsupportedError("an index along a free size that may be negative")
    tensor = call.emitter.laid(index, plain(len(index.shape)))
    sizes = constant_tensor("size", np.array(size, tensor.dtype.lower()))
    made = call.emitter.like(tensor, tensor.shape, signature=tensor.signature)
    return call.emitter.emit("FLOOR_MOD", (tensor, sizes), made)


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
    if any(-1 in each.signature for each in indices):
        raise UnsupportedError("indices of a free size along several axes")
    data = [each.data for each in indices if each.data is not None]
    if len(data) == len(indices):
        arrays = [np.broadcast_to(each, shape) for each in data]
        return constant_tensor("points", np.stack(arrays, -1))
    sizes, parts = call.emitter.integers(shape), []
    for each in indices:
        made = each
        if made.dtype != "INT32":
            cast = call.emitter.like(made, made.shape, dtype="INT32")
            made = call.emitter.emit("CAST", (made,), cast)
        if made.shape != shape:
            wide = call.emitter.like(made, shape, signature=shape)
            made = call.emitter.emit("BROADCAST_TO", (made, sizes), wide)
        parts.append(made)
    together = call.emitter.like(parts[0], (*shape, len(parts)), signature=(*shape, len(parts)))
    return call.emitter.emit("PACK", parts, together, axis=len(shape), valuesCount=len(parts))


def _gathered(call: Call) -> Value:
    """``torch.gather``: an index along one axis, along the others each place."""
    value, rank = _source(call), len(call.shape)
    if -1 in call.signature:
        raise UnsupportedError("a gather of a free size")
    indices: dict[int, Tensor] = {}
    for axis, size in enumerate(call.shape):
        places = np.arange(size, dtype=np.int32).reshape(-1, *(1,) * (rank - axis - 1))
        indices[axis] = constant_tensor("places", places)
    axis = call.arg("dim") % rank
    indices[axis] = _counted_up(call, value, axis, call.held(call.args["index"]))
    return _taken_at(call, value, indices)


def _windows(call: Call) -> Value:
    """``unfold``: windows along an axis, whose values lie on a new last axis."""
    value, rank = _source(call), len(call.shape)
    axis = call.arg("dimension") % (rank - 1)
    if value.signature[axis] == -1:
        raise UnsupportedError("windows of a free size")
    starts = np.arange(call.shape[axis])[:, None] * call.arg("step")
    places = constant_tensor("places", (starts + np.arange(call.shape[-1])).astype(np.int32))
    return _taken_along(call, value, axis, places, (axis, rank - 1))


def _shuffled(call: Call) -> Value:
    """PyTorch orders the channels of a block before its places, the format after."""
    value = _source(call)
    factor = call.arg("upscale_factor")
    if len(value.shape) != 4:
        raise UnsupportedError(f"a shuffle of {len(value.shape)} axes")
    channels = value.shape[1]
    n, h, w, _ = stored(value.shape, (0, 2, 3, 1))
    signature = stored(value.signature, (0, 2, 3, 1))
    tensor = call.emitter.laid(value, (0, 2, 3, 1))
    outputs = channels // factor**2
    order = np.arange(channels).reshape(outputs, factor**2).T.reshape(-1)
    if outputs > 1:
        made = call.emitter.like(tensor, (n, h, w, channels), signature=signature)
        places = constant_tensor("order", order.astype(np.int32))
        tensor = call.emitter.emit("GATHER", (tensor, places), made, axis=3)
    return call.emit("DEPTH_TO_SPACE", (tensor,), (0, 2, 3, 1), blockSize=factor)


def _unshuffled(call: Call) -> Value:
    value = _source(call)
    factor = call.arg("downscale_factor")
    if len(value.shape) != 4:
        raise UnsupportedError(f"a shuffle of {len(value.shape)} axes")
    tensor = call.emitter.laid(value, (0, 2, 3, 1))
    out = call.output((0, 2, 3, 1))
    channels = value.shape[1]
    if channels == 1:
        call.emitter.emit("SPACE_TO_DEPTH", (tensor,), out, blockSize=factor)
        return Value(out, (0, 2, 3, 1))
    made = call.emitter.like(out, out.shape, signature=out.signature)
    call.emitter.emit("SPACE_TO_DEPTH", (tensor,), made, blockSize=factor)
    order = np.arange(channels * factor**2).reshape(factor**2, channels).T.reshape(-1)
    places = constant_tensor("order", order.astype(np.int32))
    call.emitter.emit("GATHER", (made, places), out, axis=3)
    return Value(out, (0, 2, 3, 1))


def _all(_: Call) -> bool:
    return True


def _kept(write: Callable[[Call], Value]) -> Rule:
    return Rule(write, _all, keeps=True, moves=True)


def _axis(call: Call) -> Sequence[int]:
    given: Any = call.arg("dim")
    if given is None:
        return range(len(_source(call).shape))
    return [given] if isinstance(given, int) else list(given)


TABLE: Table = {
    **dict.fromkeys(
        (
            overload("view"),
            overload("reshape"),
            overload("reshape_as"),
            overload("_unsafe_view"),
            overload("flatten", "using_ints"),
            overload("unflatten", "int"),
        ),
        _kept(_reshape),
    ),
    **dict.fromkeys(
        (overload("squeeze", "default"), overload("squeeze", "dim"), overload("squeeze", "dims")),
        _kept(_squeezed(_axis)),
    ),
    overload("unsqueeze"): _kept(_unsqueezed),
    overload("permute"): _kept(_permuted(lambda call, _: call.arg("dims"))),
    overload("transpose", "int"): _kept(_permuted(_swapped)),
    overload("swapaxes"): _kept(
        _permuted(lambda call, rank: _swapped(call, rank, ("axis0", "axis1")))
    ),
    overload("t"): _kept(_permuted(lambda _, rank: list(range(rank))[::-1])),
    overload("numpy_T"): _kept(_permuted(lambda _, rank: list(range(rank))[::-1])),
    overload("movedim", "int"): _kept(_permuted(_moved)),
    overload("movedim", "intlist"): _kept(_permuted(_moved)),
    overload("slice", "Tensor"): _kept(_slice),
    overload("select", "int"): _kept(_selected),
    overload("cat"): _kept(_cat),
    overload("stack"): _kept(_stack),
    overload("pad"): Rule(_constant_pad, _all, keeps=True),
    overload("constant_pad_nd"): Rule(_constant_pad, _all, keeps=True),
    overload("expand"): _kept(_expand),
    overload("expand_as"): _kept(_expand),
    overload("repeat"): _kept(_repeat),
    overload("flip"): _kept(_flip),
    overload("index_select"): _kept(_gather),
    overload("index", "Tensor"): _kept(_indexed),
    overload("gather"): _kept(_gathered),
    overload("unfold"): _kept(_windows),
    overload("channel_shuffle"): _kept(_shuffled_groups),
    overload("pixel_shuffle"): _kept(_shuffled),
    overload("pixel_unshuffle"): _kept(_unshuffled),
}
