"""What layers read in a quantized model, summed over all batches, and held for the steps that come after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from backquant.accuracy.grid import gram

if TYPE_CHECKING:
    from backquant.accuracy.recipes.draft import Draft
    from backquant.accuracy.recipes.layers import Layer

_EACH, _LEAST = 16, 8192
_BYTES = 128 << 20  # of matrices that are held


@dataclass
class Read:
    """What a layer reads: the mean of ``x x^T``, float32 ``(groups, columns, columns)``, and that of each
    channel, in float64; sums until ``mean`` is called. ``most``: positions of a batch that the first is of.
    """

    most: int
    gram: Any = 0.0
    means: Any = 0.0
    positions: int = 0
    values: int = 0

    @classmethod
    def over(cls, layer: Layer, batches: int) -> Read:
        """For so many batches: of many positions, ``_EACH`` for each column and ``_LEAST`` at least."""
        wanted = max(_LEAST, _EACH * layer.inputs)
        return cls(-(-wanted // max(batches, 1)))

    def add(self, layer: Layer, x: Tensor) -> None:
        """One more batch of inputs."""
        found, count = gram(layer.float_part, x, self.most)
        by_channel = x.movedim(1 - layer.weight.dim(), 0).unsqueeze(-1).flatten(1)
        self.gram, self.positions = self.gram + found, self.positions + count
        self.means = self.means + by_channel.double().sum(1)
        self.values += by_channel.shape[1]

    def mean(self) -> Read:
        """The means of the sums."""
        return Read(self.most, self.gram / max(self.positions, 1), self.means / max(self.values, 1))


class HeldReads:
    """Those of one draft, as many as fit."""

    def __init__(self) -> None:
        self._draft: Draft | None = None
        self._found: dict[str, Read] = {}
        self._room = _BYTES

    def of(self, draft: Draft) -> dict[str, Read]:
        """What is held for ``draft``, by path of the layer; of another one nothing is held any more."""
        if self._draft is not draft:
            self._draft, self._room = draft, _BYTES
            self._found.clear()
        return self._found

    def hold(self, path: str, read: Read) -> None:
        """Hold one that the layer at ``path`` has, if there is room."""
        if path not in self._found and read.gram.nbytes <= self._room:
            self._room -= read.gram.nbytes
            self._found[path] = read
