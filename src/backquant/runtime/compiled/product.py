"""Which kernel computes the matrix product of a convolution or linear layer.

``convolution`` of ``kernels.h``, by vectors, or ``tiled_convolution`` of ``tiles.h``, by AMX.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from backquant.native.epilogue import has_tiles
from backquant.native.packing import Blocks, choose_blocks, choose_tiles, pack, tap_step
from backquant.runtime.compiled.template import HEADER, TILES

_FEWEST = 16  # rows of a tile; with fewer rows, vector instructions are as fast as tiles


@dataclass(frozen=True)
class Product:
    """``step``: the integers that one product of tiles adds up; None without AMX."""

    weight: torch.Tensor
    blocks: Blocks
    step: int | None
    threads: int

    @classmethod
    def of(cls, taps: torch.Tensor, pixels: int) -> Product:
        """The product for so many pixels; ``taps``: int8 ``[channels, taps, run]``.

        >>> Product.of(torch.ones(8, 1, 10, dtype=torch.int8), 100).step is None
        True
        """
        channels, count, run = taps.shape
        threads = torch.get_num_threads()
        step = tap_step(count, run, channels) if pixels >= _FEWEST and has_tiles() else None
        blocks = choose_blocks(pixels, channels) if step is None else choose_tiles(channels)
        return cls(pack(taps, blocks), blocks, step, threads)

    @property
    def header(self) -> Path:
        return HEADER if self.step is None else TILES

    def call(self, activation: str, adds: bool, ctype: str) -> str:
        """The call in C++."""
        b = self.blocks
        parts = f"{b.columns}, {b.last}, {b.tail}, backquant::{activation}, {str(adds).lower()}, {ctype}"
        sizes = f"{b.count}, {self.threads}"
        if self.step is None:
            return f"backquant::convolution<{b.rows}, {parts}>(x, weight, g, e, {sizes}, out);"
        return f"backquant::tiled_convolution<{parts}>(x, weight, g, e, {sizes}, {self.step}, out);"
