"""The header of a GGUF file: what it says of the model, and where its tensors lie.

Every number in it is checked against the size of the file before it is used, so that a damaged file, or one
made to harm, is an error in words: counts and lengths reach no further than the file, names and keys stand
once, tensors lie inside and do not overlap. Lists of words (a vocabulary) are passed over.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from backquant.deploy.checkpoints.gguf_blocks import BLOCK_TYPES
from backquant.errors import ArtifactError, UsageError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32
_MOST_DIMS = 4
#: Of a value, by its number: how ``struct`` reads it; texts and lists are read otherwise.
_VALUES = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_TEXT, _LIST = 8, 9
#: Of a tensor, by its number.
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A tensor of the file. ``shape``: as torch counts; ``offset``: of its first byte in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row(self) -> int:
        """Bytes of a row."""
        if self.kind in FLOATS:
            return self.shape[-1] * FLOATS[self.kind].itemsize
        block = BLOCK_TYPES[self.kind]
        return self.shape[-1] // block.count * block.size

    @property
    def size(self) -> int:
        """Bytes of all."""
        return math.prod(self.shape[:-1]) * self.row


@dataclass(frozen=True)
class GgufFile:
    """``values``: numbers and texts by key. ``tensors``: by name."""

    place: Path
    values: Mapping[str, int | float | str]
    tensors: Mapping[str, Stored]
    data: mmap.mmap

    @classmethod
    def of(cls, place: Path) -> GgufFile:
        """The file at ``place``.

        Raises ``UsageError`` where there is none, or for tensors of a type that is not read, by name;
        ``ArtifactError`` for a damaged one.
        """
        try:
            with place.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                raise _damaged(place, "it is empty") from error
            raise UsageError(
                f"{place} cannot be read: {error.strerror}",
                where=str(place),
                fix="a file that can be read",
            ) from error
        reader = _Header(place, data)
        values, tensors = reader.read()
        _check_types(place, tensors)
        _check_extents(place, tensors, len(data))
        return cls(place, values, {tensor.name: tensor for tensor in tensors}, data)

    def read(self, tensor: Stored) -> Tensor:
        """Its values, of a quantized one its bytes row by row; mapped, and copied when written to."""
        found = torch.frombuffer(
            self.data, dtype=torch.uint8, count=tensor.size, offset=tensor.offset
        )
        if tensor.kind in FLOATS:
            return found.view(FLOATS[tensor.kind]).reshape(tensor.shape)
        return found.reshape(*tensor.shape[:-1], tensor.row)


def damaged(words: str, place: Path) -> ArtifactError:
    """What is said of a file at ``place`` that cannot be right."""
    return ArtifactError(words, where=str(place), fix="copy or download the file again")


def _damaged(place: Path, words: str) -> ArtifactError:
    return damaged(f"{place} is no whole GGUF file: {words}", place)


class _Header:
    """Reads from the front on; each step is checked against the end of the file."""

    def __init__(self, place: Path, data: mmap.mmap) -> None:
        self.place, self.data, self.at = place, data, 0

    def read(self) -> tuple[dict[str, int | float | str], list[Stored]]:
        """Values and tensors."""
        if self._take(4) != _MAGIC:
            self._fail("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            self._fail(f"version {version}, read are {_VERSIONS}")
        tensors, keys = int(self._number("Q")), int(self._number("Q"))
        values = self._values(keys)
        found = [self._tensor() for _ in range(self._count(tensors, 24, "tensors"))]
        if len({t.name for t in found}) < len(found):
            self._fail("two tensors have one name")
        alignment = values.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            self._fail(f"general.alignment is {alignment}")
        start = -(-self.at // alignment) * alignment
        if any(t.offset % alignment for t in found):
            self._fail("a tensor does not begin at a multiple of general.alignment")
        return values, [Stored(t.name, t.kind, t.shape, t.offset + start) for t in found]

    def _values(self, count: int) -> dict[str, int | float | str]:
        found: dict[str, int | float | str] = {}
        seen: set[str] = set()
        for _ in range(self._count(count, 13, "keys")):
            key = self._text()
            if key in seen:
                self._fail(f"the key {key[:80]!r} stands twice")
            seen.add(key)
            kind = int(self._number("I"))
            if kind == _LIST:
                self._pass_list()
            else:
                found[key] = self._text() if kind == _TEXT else self._number(self._code(kind))
        return found

    def _tensor(self) -> Stored:
        name = self._text()
        dims = int(self._number("I"))
        if not 1 <= dims <= _MOST_DIMS:
            self._fail(f"{name[:80]!r} has {dims} axes")
        shape = [int(self._number("Q")) for _ in range(dims)]
        if 0 in shape:
            self._fail(f"{name[:80]!r} is of the size {shape}")
        number = int(self._number("I"))
        if number not in _TYPES:
            self._fail(f"{name[:80]!r} is of a type with the number {number}")
        return Stored(name, _TYPES[number], tuple(reversed(shape)), int(self._number("Q")))

    def _pass_list(self) -> None:
        kind, count = int(self._number("I")), int(self._number("Q"))
        if kind == _TEXT:
            for _ in range(self._count(count, 8, "texts")):
                self._take(int(self._number("Q")))
        else:
            self._take(count * struct.calcsize(self._code(kind)))

    def _text(self) -> str:
        try:
            return bytes(self._take(int(self._number("Q")))).decode()
        except UnicodeDecodeError:
            self._fail("a text is no UTF-8")

    def _count(self, count: int, least: int, what: str) -> int:
        """``count``, if as many fit, each of ``least`` bytes."""
        if count * least > len(self.data) - self.at:
            self._fail(f"{count} {what} are said to follow, in {len(self.data) - self.at} bytes")
        return count

    def _code(self, kind: int) -> str:
        if kind not in _VALUES:
            self._fail(f"a value is of a type with the number {kind}")
        return _VALUES[kind]

    def _number(self, code: str) -> int | float:
        found: int | float = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]
        return found

    def _take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            self._fail(f"{size} bytes are said to follow, of {len(self.data)} there are")
        self.at += size
        return self.data[self.at - size : self.at]

    def _fail(self, words: str) -> NoReturn:
        raise _damaged(self.place, words)


def _check_types(place: Path, tensors: list[Stored]) -> None:
    lost = [t for t in tensors if t.kind not in FLOATS and t.kind not in BLOCK_TYPES]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UsageError(
            f"{lost[0].name}{more} of {place} is {lost[0].kind}, which is not read",
            where=str(place),
            fix=f"a file of {', '.join((*FLOATS, *BLOCK_TYPES))}:\n"
            f"llama-quantize --allow-requantize {place.name} again.gguf Q8_0",
        )


def _check_extents(place: Path, tensors: list[Stored], end: int) -> None:
    before = 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        block = BLOCK_TYPES.get(tensor.kind)
        if block is not None and (tensor.shape[-1] % block.count or len(tensor.shape) < 2):
            raise _damaged(
                place, f"{tensor.name!r} is {tensor.kind} of the size {list(tensor.shape)}"
            )
        if tensor.offset < before:
            raise _damaged(place, f"{tensor.name!r} overlaps another tensor")
        before = tensor.offset + tensor.size
        if before > end:
            raise _damaged(place, f"{tensor.name!r} ends at {before}, and the file at {end}")
