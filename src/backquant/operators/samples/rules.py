"""How samples go through operators: a rule for each kind, which gives the dimension that holds them in the
result.

A batch of N samples stands along one dimension of a tensor: N blocks in turn, which may be one row each or,
where a view has merged it with what stood behind, several (windows of an image, heads of attention). An
operator keeps samples apart if block s of its result is what it gives for blocks s of its arguments: a rule
finds the dimension, or raises ``Mixed``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch.utils._pytree import tree_leaves

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
