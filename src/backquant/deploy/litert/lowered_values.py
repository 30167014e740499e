"""What the nodes of a program stand for while it is lowered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from backquant.deploy.litert.network import Array, Free, Scales, Tensor
from backquant.errors import ExportError

# Where the axes of a value lie in memory.
#
# A layout is a tuple: for each axis of the stored tensor the axis of PyTorch's tensor that lies there.
# ``(0, 2, 3, 1)`` is channels last. Permutations of PyTorch's graph change the layout and move nothing; an
# operator that needs another one asks for it, and only then a transpose is written.

Layout = tuple[int, ...]
CHANNELS_LAST: Layout = (0, 2, 3, 1)


def plain(rank: int) -> Layout:
    """PyTorch's own order.

    >>> plain(3)
    (0, 1, 2)
    """
    return tuple(range(rank))


def last(rank: int, axis: int) -> Layout:
    """PyTorch's order with ``axis`` moved to the end.

    >>> last(4, 1)
    (0, 2, 3, 1)
    """
    return (*(each for each in range(rank) if each != axis), axis)


def stored(sizes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Sizes in PyTorch's order as they are stored.

    >>> stored((1, 3, 8, 9), CHANNELS_LAST)
    (1, 8, 9, 3)
    """
    return tuple(sizes[axis] for axis in layout)


def logical(sizes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The inverse of ``stored``.

    >>> logical((1, 8, 9, 3), CHANNELS_LAST)
    (1, 3, 8, 9)
    """
    made = [0] * len(layout)
    for size, axis in zip(sizes, layout, strict=True):
        made[axis] = size
    return tuple(made)


def permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout of ``x.permute(order)`` where ``x`` has ``layout``.

    >>> permuted(CHANNELS_LAST, (0, 2, 3, 1))
    (0, 1, 2, 3)
    """
    place = {axis: index for index, axis in enumerate(order)}
    return tuple(place[axis] for axis in layout)


def without(layout: Layout, axes: Sequence[int]) -> Layout:
    """The layout when ``axes`` are gone.

    >>> without(CHANNELS_LAST, (2, 3))
    (0, 1)
    """
    kept = sorted(axis for axis in layout if axis not in axes)
    names = {axis: index for index, axis in enumerate(kept)}
    return tuple(names[axis] for axis in layout if axis in names)


def is_free(sizes: Sequence[int], before: Layout, after: Layout) -> bool:
    """Whether going from one layout to the other moves axes of size 1 only. ``sizes``: in PyTorch's order.

    >>> is_free((1, 8, 1, 1), (0, 1, 2, 3), CHANNELS_LAST), is_free((1, 8, 2, 1), (0, 1, 2, 3), CHANNELS_LAST)
    (True, False)
    """
    return [a for a in before if sizes[a] != 1] == [a for a in after if sizes[a] != 1]


def reshaped(sizes: Sequence[int], layout: Layout, wanted: Sequence[int]) -> Layout | None:
    """The layout of the tensor reshaped to ``wanted`` sizes, if the values can stay where they are.

    Both shapes are cut into groups of axes with equal products; groups may lie in any order, the axes within
    one may not.

    >>> reshaped((1, 8, 7, 7), CHANNELS_LAST, (1, 8, 49))
    (0, 2, 1)
    >>> reshaped((1, 8, 7, 7), CHANNELS_LAST, (1, 392)) is None
    True
    """
    groups = _groups(sizes, wanted)
    if groups is None or _by_group(layout, groups) != [axis for axis in layout if sizes[axis] != 1]:
        return None
    place = {axis: index for index, axis in enumerate(layout)}
    made: list[int] = []
    for _, after in sorted(groups, key=lambda group: min(place[a] for a in group[0])):
        made.extend(after)
    for axis in (axis for axis in range(len(wanted)) if wanted[axis] == 1):
        made.insert(min(axis, len(made)), axis)
    return tuple(made)


def ordered_for(sizes: Sequence[int], layout: Layout, wanted: Sequence[int]) -> Layout:
    """The layout that ``reshaped`` takes, as near to ``layout`` as can be: axes of a group lie together.

    >>> ordered_for((1, 2, 4, 7, 7), (0, 3, 4, 2, 1), (1, 8, 7, 7))
    (0, 3, 4, 1, 2)
    """
    groups = _groups(sizes, wanted)
    if groups is None:
        return plain(len(layout))
    made = _by_group(layout, groups)
    for axis in (axis for axis in range(len(sizes)) if sizes[axis] == 1):
        made.insert(min(layout.index(axis), len(made)), axis)
    return tuple(made)


def _by_group(layout: Layout, groups: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """Axes of more than one value, groups in the order in which their first axis lies."""
    place = {axis: index for index, axis in enumerate(layout)}
    ordered = sorted(groups, key=lambda group: min(place[axis] for axis in group[0]))
    return [axis for before, _ in ordered for axis in before]


def _groups(
    sizes: Sequence[int], wanted: Sequence[int]
) -> list[tuple[list[int], list[int]]] | None:
    """Axes of one shape, and those of the other with the same product, from the front; axes of size 1 of
    ``wanted`` are in none.

    >>> _groups((2, 3, 4), (6, 4))
    [([0, 1], [0]), ([2], [1])]
    """
    left = [axis for axis, size in enumerate(sizes) if size != 1]
    right = [axis for axis, size in enumerate(wanted) if size != 1]
    if 0 in (*sizes, *wanted):
        return None
    found = []
    while left or right:
        one: list[int] = []
        two: list[int] = []
        a = b = 1
        while not one or a != b:
            if (a <= b or not right) and left:
                one.append(left.pop(0))
                a *= sizes[one[-1]]
            elif right:
                two.append(right.pop(0))
                b *= wanted[two[-1]]
            else:
                return None
        found.append((one, two))
    return found


class UnsupportedError(Exception):
    """An operator that the format cannot express; the words say what of it."""


@dataclass(eq=False)
class Value:
    """A tensor of the file. ``layout``: see above. ``columns``: of a value that only linear layers
    read, where each value of its last axis comes from."""

    tensor: Tensor
    layout: Layout
    columns: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in PyTorch's order."""
        return logical(self.tensor.shape, self.layout)


@dataclass(eq=False)
class Dequantized:
    """A dequantize node that no operator has needed in float yet."""

    integers: Value
    floats: Value | None = None


@dataclass(eq=False)
class Constant:
    """What depends on no input: its value and, of a dequantized one, the integers and their qparams."""

    name: str
    value: torch.Tensor
    integers: torch.Tensor | None = None
    scales: Scales | None = None

    def tensor(self) -> Tensor:
        """Its value in the file, in PyTorch's order."""
        return constant_tensor(self.name, as_array(self.value))

    def integer_tensor(self) -> Tensor:
        """Its integers in the file."""
        assert self.integers is not None
        made = constant_tensor(self.name, as_array(self.integers))
        made.scales = self.scales
        return made


def as_array(value: torch.Tensor) -> Array:
    """A tensor as the array that a file holds: numbers of 64 bits in 32."""
    value = value.detach().cpu()
    if value.dtype in (torch.float64, torch.bfloat16):
        value = value.float()
    if value.is_complex():
        raise UnsupportedError("complex numbers")
    return np.asarray(value.contiguous().numpy())


def constant_tensor(name: str, data: Array) -> Tensor:
    """A constant of the file.

    >>> constant_tensor("a", np.zeros((2, 3), np.int32)).dtype
    'INT32'
    """
    return Tensor(name, data.shape, data.dtype.name.upper(), data=data)


def hints(value: Any) -> Any:
    """Sizes as numbers: a free one has that of the example inputs."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val", value)
    if isinstance(value, torch.SymInt):
        return int(value.node.hint)
    if isinstance(value, torch.SymFloat):
        return float(value.node.hint)
    if isinstance(value, (list, tuple)):
        return type(value)(map(hints, value))
    return value


def sizes_of(node: fx.Node) -> tuple[int, ...]:
    """The sizes of a node's tensor for the example inputs; those that are free are ``Free``."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise ExportError(f"{node.name} is no tensor", where="export")
    return tuple(
        size
        if isinstance(size, int)
        else int(size.node.expr)
        if size.node.expr.is_number
        else Free(size.node.hint)
        for size in value.shape
    )
