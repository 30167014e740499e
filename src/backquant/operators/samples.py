"""Whether operators keep the samples of a batch apart, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["Held", "Mixed", "check_numbers", "dimension_of_samples", "repeated"]


# How samples go through operators: a rule for each kind, which gives the dimension that holds them in the
# result.
#
# A batch of N samples stands along one dimension of a tensor: N blocks in turn, which may be one row each or,
# where a view has merged it with what stood behind, several (windows of an image, heads of attention). An
# operator keeps samples apart if block s of its result is what it gives for blocks s of its arguments: a rule
# finds the dimension, or raises ``Mixed``.

Size = tuple[int, ...]


class Mixed(Exception):  # noqa: N818 - a reason, no error of the user's
    """Why an operator may mix samples. Internal."""


class Held(NamedTuple):
    """A tensor: its size, and the dimension that holds samples; ``None``: it is the same for all of them."""

    size: Size
    samples: int | None = None


#: The dimension of the results, from the arguments, the size of the first result and the number of samples.
Rule = Callable[[Sequence[Any], Size, int], int]


def _first(arguments: Sequence[Any]) -> tuple[Held, int]:
    """The input, and the dimension of its samples."""
    found: Held = arguments[0]
    if found.samples is None:
        raise Mixed("with samples in another place than its input")
    return found, found.samples


def _holding(arguments: Sequence[Any]) -> list[Held]:
    """All tensors; lists of them, too."""
    found = tree_leaves(list(arguments), is_leaf=lambda value: isinstance(value, Held))
    return [value for value in found if isinstance(value, Held)]


def _other_than(held: Held, dims: Iterable[int], what: str) -> None:
    if held.samples in {dim % len(held.size) for dim in dims}:
        raise Mixed(what)


def _listed(dims: int | Sequence[int]) -> Sequence[int]:
    return (dims,) if isinstance(dims, int) else dims


def pointwise(arguments: Sequence[Any], *_: Any) -> int:
    tensors = _holding(arguments)
    rank = max(len(held.size) for held in tensors)
    found = {held.samples - len(held.size) for held in tensors if held.samples is not None}
    if len(found) != 1:
        raise Mixed("with samples along different dimensions")
    (last,) = found
    for held in tensors:
        if held.samples is None and len(held.size) >= -last and held.size[last] != 1:
            raise Mixed("with something else for each sample")
    return rank + last


def plainly(place: int, value: Any) -> Rule:
    """Pointwise, where argument ``place`` is ``value`` or is not there: with another one there is a second
    operation, which may be joined with the first."""

    def rule(arguments: Sequence[Any], *_: Any) -> int:
        if len(arguments) > place and arguments[place] != value:
            raise Mixed("of more than one operation")
        return pointwise(arguments)

    return rule


def leading(count: int) -> Rule:
    """The first ``count`` tensors hold samples along their first dimension, or are the same for all; the
    others are the same for all."""

    def rule(arguments: Sequence[Any], *_: Any) -> int:
        tensors = _holding(arguments)
        if {held.samples for held in tensors[:count]} - {None} != {0}:
            raise Mixed("with samples along another dimension than the first")
        if any(held.samples is not None for held in tensors[count:]):
            raise Mixed("with weights of each sample's own")
        if any(held.samples is None and held.size[:1] != (1,) for held in tensors[:count]):
            raise Mixed("with something else for each sample")
        return 0

    return rule


def rows(arguments: Sequence[Any], *_: Any) -> int:
    """Linear layers: each row by itself."""
    x, *others = _holding(arguments)
    if x.samples is None or any(held.samples is not None for held in others):
        raise Mixed("with weights of each sample's own")
    _other_than(x, (-1,), "over samples")
    return x.samples


def view(arguments: Sequence[Any], size: Size, count: int) -> int:
    """Blocks stay blocks where as much stands before their dimension as before."""
    x, place = _first(arguments)
    before = math.prod(x.size[:place])
    for dim, length in enumerate(size):
        if math.prod(size[:dim]) == before and length and length % count == 0:
            return dim
    raise Mixed("that cuts through samples")


def expanded(arguments: Sequence[Any], size: Size, _: int) -> int:
    x, place = _first(arguments)
    return place - len(x.size) + len(size)


def permuted(arguments: Sequence[Any], *_: Any) -> int:
    x, place = _first(arguments)
    return [dim % len(x.size) for dim in arguments[1]].index(place)


def transposed(arguments: Sequence[Any], *_: Any) -> int:
    x, place = _first(arguments)
    one, other = (dim % len(x.size) for dim in arguments[1:3] or (0, 1))
    return {one: other, other: one}.get(place, place)


def selected(arguments: Sequence[Any], *_: Any) -> int:
    (x, place), dim = _first(arguments), int(arguments[1]) % len(arguments[0].size)
    _other_than(x, (dim,), "of one sample")
    return place - (dim < place)


def along(place: int) -> Rule:
    """Works along the dimensions that argument ``place`` names, which stay."""

    def rule(arguments: Sequence[Any], *_: Any) -> int:
        (x, samples), dims = _first(arguments), arguments[place]
        if dims == ():
            raise Mixed("over all dimensions")
        _other_than(x, _listed(dims), "over samples")
        return samples

    return rule


def sliced(arguments: Sequence[Any], *_: Any) -> int:
    (x, place), (dim, start, end, step) = _first(arguments), arguments[1:5]
    is_whole = not start and (end is None or end >= x.size[dim]) and step == 1
    _other_than(x, () if is_whole else (dim,), "over samples")
    return place


def unsqueezed(arguments: Sequence[Any], *_: Any) -> int:
    x, place = _first(arguments)
    dim = int(arguments[1]) % (len(x.size) + 1)
    return place + (dim <= place)


def squeezed(arguments: Sequence[Any], *_: Any) -> int:
    x, place = _first(arguments)
    if len(arguments) == 1:
        raise Mixed("of all dimensions")
    dims = {dim % len(x.size) for dim in _listed(arguments[1])}
    _other_than(x, dims, "of the dimension of samples")
    return place - sum(dim < place and x.size[dim] == 1 for dim in dims)


def joined(arguments: Sequence[Any], *_: Any) -> int:
    parts = _holding(arguments[:1])
    found = {held.samples for held in parts}
    if len(found) != 1 or None in found:
        raise Mixed("of what holds samples along different dimensions")
    _other_than(parts[0], arguments[1:2], "of samples")
    return int(parts[0].samples or 0)


def stacked(arguments: Sequence[Any], *_: Any) -> int:
    parts = _holding(arguments[:1])
    if len({held.samples for held in parts}) != 1:
        raise Mixed("of what holds samples along different dimensions")
    return unsqueezed((parts[0], arguments[1]))


def padded(arguments: Sequence[Any], *_: Any) -> int:
    (x, place), pads = _first(arguments), arguments[1]
    dims = [-1 - i // 2 for i, pad in enumerate(pads) if pad]
    _other_than(x, dims, "between samples")
    return place


def by_itself(arguments: Sequence[Any], *_: Any) -> int:
    """Each value by itself, with what is the same for all."""
    if any(held.samples is not None for held in _holding(arguments[1:])):
        raise Mixed("with something else for each sample")
    return _first(arguments)[1]


def embedded(arguments: Sequence[Any], *_: Any) -> int:
    table, rows = arguments[:2]
    if table.samples is not None:
        raise Mixed("of each sample's own table")
    return int(rows.samples)


def attention(arguments: Sequence[Any], _: Size, count: int) -> int:
    """[batch, heads, rows, width] three times, then what is added to scores: [batches, …], counted modulo its
    own number of them."""
    q, k, v, *added = _holding(arguments)
    found = {q.samples, k.samples, v.samples}
    ranks = {len(held.size) for held in (q, k, v, *added) if held.samples is not None}
    if found not in ({0}, {1}) or ranks != {4}:
        raise Mixed("with samples along other dimensions than batch or heads")
    (place,) = found
    last, block = int(place or 0) - 4, q.size[0] // count if place == 0 else 1
    for held in added:
        each = 1 if len(held.size) < -last else held.size[last]
        if held.samples != place and (held.samples is not None or block % each):
            raise Mixed("with something else for each sample")
    return int(place or 0)


def restrided(arguments: Sequence[Any], *_: Any) -> int:
    """In place, of a result whose strides a kernel had to choose: dimensions of size one apart."""
    x, place = _first(arguments)
    if tuple(arguments[1]) != x.size or arguments[3]:
        raise Mixed("to another size")
    return place


# Which operators compute each sample of a batch by itself, to the last bit, and by which rule.
#
# An operator is listed only where the bits of a value follow from the values that it is computed from: not
# from how many stand beside it, nor from where it stands. PyTorch's sums of floats and products of matrices
# are ordered as sizes say; ``sigmoid``, ``silu`` or ``gelu`` round the last values of a row, which fill no
# vector, otherwise than the others; oneDNN chooses its code by the whole shape. So none of them is listed,
# nor any kernel on packed weights that are not ours.
#
# Operators are named as their schemas are (``aten::add``), overloads alike. What is not listed may mix
# samples.


def dimension_of_samples(
    operator: torch._ops.OpOverload, arguments: Sequence[Any], size: Size, count: int
) -> int:
    """The dimension of the results of ``operator`` that holds samples, which some argument holds. Raises
    ``Mixed``.

    ``arguments``: all by position, with a ``Held`` in place of each tensor; ``size``: of the first result.

    >>> from backquant.operators.samples import Held
    >>> add, x = torch.ops.aten.add.Tensor, Held((8, 3), 0)
    >>> dimension_of_samples(add, [x, Held((3,)), 1], (8, 3), 8)
    0
    >>> dimension_of_samples(torch.ops.aten.softmax.int, [x, 0], (8, 3), 8)
    Traceback (most recent call last):
    backquant.operators.samples.Mixed: aten::softmax may give other bits in another batch
    """
    name = operator._schema.name
    rule = _RULES.get(name)
    if rule is None:
        raise Mixed(f"{name} may give other bits in another batch")
    try:
        return rule(arguments, size, count)
    except Mixed as problem:
        raise Mixed(f"{name} {problem}") from None


def repeated(
    operator: torch._ops.OpOverload, arguments: Sequence[Any], size: Size, count: int
) -> int | None:
    """The dimension along which a result of this size holds the same for each of ``count`` samples, of an
    operator that reads no samples; ``None``: there is not one such dimension.

    >>> from backquant.operators.samples import Held
    >>> expand = torch.ops.aten.expand.default
    >>> [repeated(expand, [Held((rows, 1))], (8, 3), 8) for rows in (1, 8)]
    [0, None]
    """
    found = [dim for dim, length in enumerate(size) if length == count]
    if operator._schema.name not in _REPEATS or len(found) != 1:
        return None
    last = found[0] - len(size)
    read = [value for value in arguments if isinstance(value, Held)]
    alike = all(len(each.size) < -last or each.size[last] == 1 for each in read)
    return found[0] if alike else None


def check_numbers(
    operator: torch._ops.OpOverload, read: Iterable[torch.dtype], made: Iterable[torch.dtype]
) -> None:
    """Raise ``Mixed`` unless the operator is listed, and for numbers of these dtypes.

    >>> check_numbers(torch.ops.aten.mul.Tensor, [torch.float32], [torch.float32])
    >>> check_numbers(torch.ops.aten.mul.Tensor, [torch.float16], [torch.float16])
    Traceback (most recent call last):
    backquant.operators.samples.Mixed: aten::mul of torch.float16
    """
    name, read, made = operator._schema.name, set(read), set(made)
    if not read and (name in _FROM_NOTHING or not any(d.is_floating_point for d in made)):
        return
    if name not in _RULES:
        raise Mixed(f"{name} may give other bits in another batch")
    known = _NUMBERS | _QUANTIZED if name in _ON_QUANTIZED else _NUMBERS
    for dtype in (read | made) - known:
        raise Mixed(f"{name} of {dtype}")
    to_integers = not any(dtype.is_floating_point for dtype in made)
    if name in _CONVERTS and to_integers and any(dtype.is_floating_point for dtype in read):
        raise Mixed(f"{name} from floats to integers, which may be beyond them")


def _table(*rows: tuple[Rule, str, str]) -> Mapping[str, Rule]:
    made: dict[str, Rule] = {}
    for rule, namespace, names in rows:
        made |= {f"{namespace}::{name}": rule for name in names.split()}
    return MappingProxyType(made)


_OURS = "backquant_kernels"

#: Each row says why a value has the same bits wherever it stands and whatever stands beside it.
_RULES = _table(
    # Ours: exact sums of integers, or of floats in an order of each row; a vector that is not full takes
    # the same instructions as one that is.
    (leading(1), _OURS, "convolution averaged maxima"),
    (leading(2), _OURS, "convolution_add gated shuffled"),
    (rows, _OURS, "linear"),
    (by_itself, _OURS, "quantized looked_up rescaled"),
    (attention, _OURS, "attention attention_biased attention_biased_twice"),
    # Values are moved, or selected.
    (pointwise, "aten", "clone detach alias contiguous _to_copy to copy_ int_repr where"),
    (pointwise, "aten", "zeros_like ones_like full_like masked_fill masked_fill_"),
    (pointwise, "aten", "_make_per_tensor_quantized_tensor"),
    (view, "aten", "view _unsafe_view reshape flatten unflatten"),
    (expanded, "aten", "expand"),
    (permuted, "aten", "permute"),
    (transposed, "aten", "transpose t"),
    (selected, "aten", "select unbind"),
    (sliced, "aten", "slice"),
    (along(1), "aten", "flip narrow"),
    (along(2), "aten", "split split_with_sizes chunk roll"),
    (unsqueezed, "aten", "unsqueeze"),
    (squeezed, "aten", "squeeze"),
    (joined, "aten", "cat"),
    (stacked, "aten", "stack"),
    (
        padded,
        "aten",
        "constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d pad",
    ),
    (embedded, "aten", "embedding"),
    (leading(1), "aten", "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices"),
    (leading(1), "aten", "max_pool3d_with_indices quantized_max_pool1d quantized_max_pool2d"),
    (leading(1), "aten", "upsample_nearest1d upsample_nearest2d"),
    (restrided, "aten", "as_strided_"),
    # Operations that IEEE 754 rounds, one after the other: none is joined with another, as in a * b + c.
    (pointwise, "aten", "mul mul_ abs abs_ neg neg_ sqrt sqrt_ rsqrt reciprocal"),
    (pointwise, "aten", "ceil floor round trunc sign eq ne lt le gt ge"),
    (
        pointwise,
        "aten",
        "logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not",
    ),
    (pointwise, "aten", "relu relu_ clamp clamp_ clamp_min clamp_min_ hardtanh hardtanh_"),
    (
        pointwise,
        "aten",
        "hardswish hardswish_ hardsigmoid hardsigmoid_ leaky_relu leaky_relu_",
    ),
    (pointwise, "aten", "prelu _prelu_kernel dequantize quantize_per_tensor"),
    (plainly(2, 1), "aten", "add add_ sub sub_"),
    (plainly(2, None), "aten", "div div_"),
)
_NUMBERS = frozenset(
    {
        *(torch.float32, torch.float64, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32})

#: What takes quantized tensors, or gives them; others dequantize the end of a row otherwise than its vectors.
_ON_QUANTIZED = frozenset(
    f"aten::{name}"
    for name in (
        *("_make_per_tensor_quantized_tensor", "quantize_per_tensor", "dequantize", "int_repr"),
        *("quantized_max_pool1d", "quantized_max_pool2d", "view", "_unsafe_view", "permute"),
        *("transpose", "unsqueeze", "squeeze", "as_strided_"),
    )
)
_CONVERTS = frozenset({"aten::_to_copy", "aten::to", "aten::copy_"})
_FROM_NOTHING = frozenset(
    f"aten::{name}"
    for name in ("zeros", "ones", "full", "scalar_tensor", "empty", "_empty_affine_quantized")
)
_REPEATS = frozenset(f"aten::{name}" for name in ("expand", "zeros", "ones", "full"))
