"""Over which values of a tensor one scale is shared.

A granularity is written as a word with arguments, the same in Python, files and messages:

``per_tensor``, ``per_channel``, ``per_channel(axis=1)``, ``per_group(size=128)``,
``per_group(axis=0, size=32)``, ``per_block(shape=[64, 128])``, ``per_token``.

1. ``per_group``: runs of ``size`` values along ``axis`` (default: the last), each row by itself.
2. ``per_block``: blocks of ``shape``, which counts from the last axis; along the axes before it every
   index has blocks of its own.
3. ``per_token``: every slice along the last axis. Of values that are quantized at each call only.

What is left out in a description admits anything: ``per_group`` any size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backquant.errors import SpecError, did_you_mean

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "per_tensor": (),
    "per_channel": ("axis",),
    "per_group": ("axis", "size"),
    "per_block": ("shape",),
    "per_token": (),
}
_FORM = re.compile(r"([a-z_]+)(?:\((.*)\))?")
_ARGUMENT = re.compile(r"\s*([a-z]+)\s*=\s*(-?\d+|\[\s*\d+(?:\s*,\s*\d+)*\s*\])\s*(?:,|$)")


@dataclass(frozen=True)
class Undivided:
    """A size of groups or blocks that does not divide the axis that they lie on."""

    axis: int
    size: int
    length: int

    @property
    def nearest(self) -> int:
        """The size that divides, nearest to the one that was asked for.

        >>> Undivided(1, 128, 100).nearest
        100
        """
        divisors = [n for n in range(1, self.length + 1) if self.length % n == 0]
        return min(divisors, key=lambda n: (abs(n - self.size), n))


@dataclass(frozen=True)
class Granularity:
    """Which values share a scale; see the module. Raises ``SpecError`` for an unknown word or argument.

    >>> Granularity("per_group", size=128)
    Granularity.parse('per_group(size=128)')
    """

    kind: str
    axis: int | None = None
    size: int | None = None
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in _PARAMETERS:
            raise _unknown(self.kind)
        for name in ("axis", "size", "shape"):
            if getattr(self, name) is not None and name not in _PARAMETERS[self.kind]:
                raise _no_argument(self.kind, name)
        sizes = (self.size,) if self.size is not None else self.shape or ()
        if any(size < 1 for size in sizes):
            raise SpecError(
                f"groups and blocks have at least one value: {self}", where="granularity"
            )

    @classmethod
    def parse(cls, text: str) -> Granularity:
        """The granularity that ``text`` spells; ``str`` gives the normal spelling.

        >>> str(Granularity.parse("per_group(size=32,axis=0)"))
        'per_group(axis=0, size=32)'
        """
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise _unknown(text)
        kind, inside = found[1], found[2] or ""
        if kind not in _PARAMETERS:
            raise _unknown(kind)
        values: dict[str, Any] = {}
        place = 0
        while place < len(inside):
            argument = _ARGUMENT.match(inside, place)
            if argument is None or argument[1] not in _PARAMETERS[kind]:
                raise _no_argument(kind, inside[place:] if argument is None else argument[1])
            numbers = [int(number) for number in re.findall(r"-?\d+", argument[2])]
            is_list = argument[2].startswith("[")
            if is_list != (argument[1] == "shape"):
                raise _no_argument(kind, f"{argument[1]}={argument[2]}")
            values[argument[1]] = tuple(numbers) if is_list else numbers[0]
            place = argument.end()
        return cls(kind, **values)

    def __str__(self) -> str:
        given = {name: getattr(self, name) for name in _PARAMETERS[self.kind]}
        listed = [
            f"{name}={list(value) if name == 'shape' else value}"
            for name, value in given.items()
            if value is not None
        ]
        return f"{self.kind}({', '.join(listed)})" if listed else self.kind

    def __repr__(self) -> str:
        return f"Granularity.parse({str(self)!r})"

    @property
    def words(self) -> str:
        """In words, for people.

        >>> Granularity.parse("per_group(size=128)").words, Granularity("per_group").words
        ('per group of 128', 'per group')
        """
        text = self.kind.replace("_", " ")
        if self.size is not None:
            text += f" of {self.size}"
        if self.shape is not None:
            text += f" of {' × '.join(map(str, self.shape))}"
        return text if self.axis is None else f"{text} along axis {self.axis}"

    @property
    def has_blocks(self) -> bool:
        """Whether the scales lie on a grid over the tensor, not along one axis."""
        return self.kind in ("per_group", "per_block")

    @property
    def lies_on_rows(self) -> bool:
        """Whether scales belong to groups along the last axis."""
        return self.kind == "per_group" and self.axis in (None, -1)

    def admits(self, asked: Granularity) -> bool:
        """Whether ``asked`` is the same, or a more specific one.

        >>> any_group = Granularity("per_group")
        >>> any_group.admits(Granularity.parse("per_group(size=32)"))
        True
        """
        if self.kind != asked.kind:
            return False
        axes = self.axis is None or self.axis == asked.axis or {self.axis, asked.axis} == {None, -1}
        sizes = self.size in (None, asked.size)
        return axes and sizes and self.shape in (None, asked.shape)

    def block(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the blocks of a tensor of this shape.

        >>> Granularity.parse("per_group(size=32)").block((8, 64))
        (1, 32)
        >>> Granularity.parse("per_block(shape=[4, 32])").block((3, 8, 64))
        (1, 4, 32)
        """
        rank = len(shape)
        if self.kind == "per_group":
            axis = -1 if self.axis is None else self.axis
            if not -rank <= axis < rank or self.size is None:
                raise SpecError(f"{self} is no grid over {list(shape)}", where="granularity")
            return tuple(self.size if at == axis % rank else 1 for at in range(rank))
        if self.kind == "per_block" and self.shape is not None and len(self.shape) <= rank:
            return (1,) * (rank - len(self.shape)) + self.shape
        raise SpecError(f"{self} is no grid over {list(shape)}", where="granularity")

    def undivided(self, shape: Sequence[int]) -> Undivided | None:
        """The first axis of a tensor of this shape that the blocks do not divide.

        >>> Granularity.parse("per_group(size=128)").undivided((8, 100))
        Undivided(axis=1, size=128, length=100)
        """
        sides = zip(self.block(shape), shape, strict=True)
        return next(
            (
                Undivided(at, size, length)
                for at, (size, length) in enumerate(sides)
                if length % size
            ),
            None,
        )


def block_of(shape: Sequence[int], grid: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a tensor's blocks, from the shape of its grid of scales; None if the scales form no grid.

    Raises ``SpecError`` for a grid that does not divide the tensor.

    >>> block_of((8, 64), (8, 2)), block_of((8, 64), (8,))
    ((1, 32), None)
    """
    if len(grid) < 2:
        return None
    fits = len(grid) == len(shape) and all(
        b and a % b == 0 for a, b in zip(shape, grid, strict=True)
    )
    if not fits:
        raise SpecError(
            f"a grid of {list(grid)} scales does not divide a tensor {list(shape)}",
            where="scale",
            fix="one scale for each block, in the shape of the grid",
        )
    return tuple(a // b for a, b in zip(shape, grid, strict=True))


def _unknown(word: str) -> SpecError:
    known = [str(Granularity(kind)) for kind in _PARAMETERS]
    fix = did_you_mean(word, known, f"one of {', '.join(known)}")
    return SpecError(f"there is no granularity {word!r}", where="granularity", fix=fix)


def _no_argument(kind: str, argument: str) -> SpecError:
    known = _PARAMETERS[kind]
    takes = " and ".join(f"{n}=[64, 128]" if n == "shape" else f"{n}=128" for n in known)
    return SpecError(
        f"{kind} takes no {argument!r}",
        where="granularity",
        fix=f"{kind}({', '.join(takes.split(' and '))})" if known else kind,
    )


# Scales of groups and blocks in the dtypes that hardware stores them in.
#
# 1. E8M0 by OCP's rule, ``2**(floor(log2(largest)) - exponent of the dtype's largest)``, so that the largest
#    values of a block may saturate (MX specification 1.0, section 6.3).
# 2. E4M3 rounded to nearest, in units of the one scale with which the largest block takes E4M3's largest
#    value (NVFP4).
# 3. Float16 and bfloat16 rounded to nearest (GGUF, checkpoints of language models); the zero point that
#    belongs to a scale stays.

_LEAST = 2.0**-9  # the smallest that E4M3 has: no scale is 0
_NARROW = (torch.float16, torch.bfloat16)


def unit_of(scale: Tensor) -> Tensor:
    """Rule 2: the one scale, float32, with which the largest of ``scale`` is E4M3's largest value.

    >>> unit_of(torch.tensor([1.0, 448.0]))
    tensor(1.)
    """
    return (scale.max() / torch.finfo(torch.float8_e4m3fn).max).float()


def stored_scale(
    scale: Tensor, scale_dtype: torch.dtype | None, high: float, unit: Tensor | None = None
) -> Tensor:
    """``scale`` (float64, any shape) rounded to ``scale_dtype``; ``high``: the largest value of an element.
    ``unit``: of rule 2, where other tensors share it.

    >>> stored_scale(torch.tensor([0.3, 1.0]).double(), torch.float8_e8m0fnu, 448).tolist()
    [0.5, 1.0]
    """
    if scale_dtype is torch.float8_e8m0fnu:
        largest = torch.floor(torch.log2(scale * high)) - math.floor(math.log2(high))
        return torch.exp2(largest.clamp(-127, 127))
    if scale_dtype is torch.float8_e4m3fn:
        unit = (unit_of(scale) if unit is None else unit).double()
        parts = (scale / unit).float().to(torch.float8_e4m3fn).double()
        return parts.clamp(min=_LEAST) * unit
    if scale_dtype in _NARROW:
        least = torch.finfo(scale_dtype).smallest_normal
        most = torch.finfo(scale_dtype).max
        return scale.clamp(least, most).to(scale_dtype).double()
    return scale
