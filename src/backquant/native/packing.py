"""The layouts in which our kernels read weights, and how they cut the work into blocks.

A weight is ``[blocks, taps, run / 4, channels, 4]``: four neighbours of the input are multiplied with four
rows of the weight. How the four of all channels of a register lie is its ``Order``. See ``lanes.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

_LANES = 16  # sums in a register of AVX-512
TAPS = 64  # MAX_TAPS of kernels.h: larger kernels are oneDNN's
_RUNS, _EDGE = 8, 256  # RUNS of kernels.h, and the bytes of each
_SPAN = 16  # SPAN of kernels.h
_NARROW = 16  # up to so many channels, the taps of one row of the kernel are read as one
_ROWS = {1: 14, 2: 12, 3: 8, 4: 6}  # pixels at a time, by registers for channels: 24 sums at most
_PART = 1 << 18  # numbers that are summed in one call
_TILE_ROWS, _TILE_BYTES = 32, 64  # of AMX: two tiles of 16 pixels at a time
_COPY = 4  # cycles for one tap of a pixel that is gathered


class Order(Enum):
    """How the weights of a register lie: ``BACKQUANT_ORDER`` of ``lanes.h``."""

    BYTES = 1  #: four bytes of each lane
    PAIRS = 2  #: 16 bits each, the even ones before the odd ones
    PLACES = 3  #: 16 bits each, the first ones of all lanes, then the second ones
    SIGNED = 4  #: as BYTES; inputs count less 128, which the correction of the plan makes up for


@dataclass(frozen=True)
class Layout:
    """Of packed weights: ``lanes`` sums in a register. ``tiles``: some are multiplied by AMX."""

    lanes: int = _LANES
    order: Order = Order.BYTES
    tiles: bool = False

    @property
    def offset(self) -> int:
        """What the kernels take from every input."""
        return 128 if self.order is Order.SIGNED else 0

    def ordered(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed int8 as these kernels read it.

        >>> fours = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.int8)
        >>> Layout(2, Order.PAIRS).ordered(fours).tolist()
        [1, 3, 5, 7, 2, 4, 6, 8]
        >>> Layout(2, Order.PLACES).ordered(fours).tolist()
        [1, 5, 2, 6, 3, 7, 4, 8]
        """
        if self.order is Order.PAIRS:
            pairs = packed.view(-1, self.lanes, 2, 2)
            return pairs.permute(0, 3, 1, 2).reshape(-1).short()
        if self.order is Order.PLACES:
            return packed.view(-1, self.lanes, 4).transpose(1, 2).reshape(-1).short()
        return packed


AVX512_LAYOUT = Layout()


@dataclass(frozen=True)
class Blocks:
    """``rows`` pixels times ``columns`` registers of channels at a time; ``count`` blocks of channels, of
    which the last has ``last`` registers, and the last of these ``tail`` channels."""

    rows: int
    columns: int
    count: int
    last: int
    tail: int

    @classmethod
    def of(cls, rows: int, columns: int, channels: int, lanes: int = _LANES) -> Blocks:
        """The blocks for so many channels."""
        registers = -(-channels // lanes)
        count = -(-registers // columns)
        last = registers - (count - 1) * columns
        tail = channels - (registers - 1) * lanes
        return cls(rows, columns, count, last, tail)


def choose_blocks(pixels: int, channels: int, lanes: int = _LANES) -> Blocks:
    """The blocks for an output of so many pixels and channels. ``lanes``: channels in a register.

    >>> choose_blocks(3136, 64)
    Blocks(rows=6, columns=4, count=1, last=4, tail=16)
    >>> choose_blocks(49, 80)
    Blocks(rows=7, columns=3, count=2, last=2, tail=16)
    """
    registers = -(-channels // lanes)
    columns = -(-registers // -(-registers // 4))
    pixels = max(pixels, 1)
    rows = min(
        range(1, _ROWS[columns] + 1),
        key=lambda n: (-(-pixels // n) * (max(n * columns, 8) + columns), -n),
    )
    return Blocks.of(rows, columns, channels, lanes)


def reads_rows(weight: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether the taps of one row of a kernel ``[out, in, height, width]`` are read as one.

    >>> reads_rows((64, 3, 7, 7), (1, 1)), reads_rows((64, 64, 3, 3), (1, 1))
    (True, False)
    """
    _, deep, height, width = weight
    narrow = deep <= _NARROW and deep * width <= _EDGE and height <= _RUNS
    return width > 1 and narrow and dilation[1] == 1


def tile_step(row: int) -> int | None:
    """How many of the ``row`` integers of a sum one product of AMX tiles takes: a divisor, a multiple of 4,
    at most 64. None where that makes many more products than 64 would.

    >>> tile_step(768), tile_step(96), tile_step(4 * 17)
    (64, 48, None)
    """
    if row % 4:
        return None
    least = -(-row // _TILE_BYTES)
    most = least + least // 2
    return next((row // n for n in range(least, most + 1) if row % (4 * n) == 0), None)


def tap_step(taps: int, run: int, channels: int) -> int | None:
    """The step for ``taps`` taps of ``run`` integers, which are laid out by fours: one that takes each tap by
    itself, so that no pixel has to be gathered, unless the products for so many channels cost more than that.

    >>> tap_step(9, 64, 64), tap_step(9, 16, 64), tap_step(9, 16, 512), tap_step(7, 21, 64)
    (64, 16, 48, 24)
    """
    run = -(-run // 4) * 4
    whole, each = tile_step(taps * run), tile_step(run)
    if whole is None or each is None:
        return whole or each
    # cycles of a pixel: a product of 16 pixels with 32 channels takes 32
    products = 2 * taps * run * -(-channels // 32)
    return each if products / each <= products / whole + _COPY * taps else whole


def choose_tiles(channels: int) -> Blocks:
    """The blocks for so many channels by AMX.

    >>> choose_tiles(80)
    Blocks(rows=32, columns=2, count=3, last=1, tail=16)
    """
    columns = min(-(-channels // _LANES), 2)
    return Blocks.of(_TILE_ROWS, columns, channels)


def row_sums(weight: torch.Tensor) -> torch.Tensor:
    """The int64 sums of int8 ``[out, ...]``, in parts: torch makes int64 of all that it sums in one call.

    >>> row_sums(torch.ones(2, 3, 5, dtype=torch.int8))
    tensor([15, 15])
    """
    rows = weight.flatten(1)
    parts = rows.split(max(1, _PART // max(1, rows.shape[1])))
    return torch.cat([part.sum(1, dtype=torch.int64) for part in parts])


def pack(weight: torch.Tensor, blocks: Blocks, layout: Layout = AVX512_LAYOUT) -> torch.Tensor:
    """int8 ``[channels, taps, run]`` as ``convolution`` reads it; what is missing is zero.

    >>> blocks = choose_blocks(1, 2)
    >>> pack(torch.tensor([[[1, 2, 3]], [[4, 5, 6]]], dtype=torch.int8), blocks)[:8].tolist()
    [1, 2, 3, 0, 4, 5, 6, 0]
    """
    channels, taps, run = weight.shape
    deep, wide = -(-run // 4), blocks.columns * layout.lanes
    full = torch.zeros(blocks.count * wide, taps, deep * 4, dtype=torch.int8)
    full[:channels, :, :run] = weight
    shaped = full.view(blocks.count, wide, taps, deep, 4)
    head = shaped[:-1].permute(0, 2, 3, 1, 4).reshape(-1)
    last = shaped[-1, : blocks.last * layout.lanes].permute(1, 2, 0, 3).reshape(-1)
    return layout.ordered(torch.cat([head, last]))


def spans(weight: Sequence[int], groups: int) -> bool:
    """Whether a convolution ``[out, in / groups, ...]`` in groups is computed 16 channels at a time.

    >>> spans((48, 8, 3, 3), 6), spans((48, 24, 3, 3), 2)
    (True, False)
    """
    out, deep = weight[:2]
    return deep in (4, 8, 16) and out == deep * groups


def span_rows(width: int, deep: int) -> int:
    """Pixels at a time of such a convolution by AVX-512, whose result has so many in a row.

    >>> span_rows(28, 8), span_rows(14, 16)
    (7, 5)
    """
    most = 6 if deep == 16 else 8
    return -(-width // -(-width // most))


def pack_spans(weight: torch.Tensor, layout: Layout = AVX512_LAYOUT) -> torch.Tensor:
    """int8 ``[channels, in / groups, height, width]`` as ``Grouped`` reads it.

    >>> pack_spans(torch.ones(16, 8, 3, 3, dtype=torch.int8)).numel()
    1152
    """
    channels, deep = weight.shape[:2]
    outputs, parts, count = layout.lanes // 4, deep // 4, -(-channels // _SPAN)
    full = torch.zeros(count * _SPAN, deep, *weight.shape[2:], dtype=torch.int8)
    full[:channels] = weight
    # a channel is counted by group, register and 128 bits of it; an input by lane and byte
    shaped = full.view(count, _SPAN // deep, deep // outputs, outputs, parts, 4, -1)
    return layout.ordered(shaped.permute(0, 6, 2, 3, 1, 4, 5).reshape(-1))


def pack_depthwise(weight: torch.Tensor, layout: Layout = AVX512_LAYOUT) -> torch.Tensor:
    """int8 ``[channels, height, width]`` as ``Depthwise`` reads it.

    >>> pack_depthwise(torch.ones(3, 3, 3, dtype=torch.int8)).numel()
    768
    """
    channels, height, width = weight.shape
    lanes, groups = layout.lanes, -(-height // 4)
    parts = -(-channels // (4 * lanes))
    full = torch.zeros(parts * 4 * lanes, groups * 4, width, dtype=torch.int8)
    full[:channels, :height] = weight
    # a channel is counted by part, 128 bits of a register, register and place
    shaped = full.view(parts, lanes // 4, 4, 4, groups, 4, width)
    return layout.ordered(shaped.permute(0, 6, 4, 2, 1, 3, 5).reshape(-1))


def by_channel(values: torch.Tensor) -> torch.Tensor:
    """Numbers ``[channels]`` of 32 bits with room for a whole register after the last.

    >>> by_channel(torch.ones(3)).numel()
    19
    """
    return torch.cat([values, values.new_zeros(_LANES)])


def by_lane(values: torch.Tensor, lanes: int = _LANES) -> torch.Tensor:
    """Numbers ``[channels]`` of 32 bits in the order of the sums of ``Depthwise``, four registers at a time.

    >>> by_lane(torch.arange(64.0))[:8].tolist()
    [0.0, 1.0, 2.0, 3.0, 16.0, 17.0, 18.0, 19.0]
    """
    parts = -(-values.numel() // (4 * lanes))
    full = values.new_zeros(parts * 4 * lanes)
    full[: values.numel()] = values
    return full.view(parts, lanes // 4, 4, 4).permute(0, 2, 1, 3).reshape(-1)
