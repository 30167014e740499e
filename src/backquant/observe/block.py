"""Observers of groups and blocks: one scale for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backquant.dtypes import (
    Granularity,
    QParams,
    dequantize_tensor,
    is_per_channel,
    quantize_tensor,
)
from backquant.dtypes.table import INT4
from backquant.errors import ConfigError
from backquant.observe.base import EPS
from backquant.observe.minmax import FiniteRange, PartsMinMaxObserver

_SHRINKS = 40  # ranges that are tried: from the whole down to a fifth of it, in steps of 2 %
_STEP = 0.02


class BlockMinMaxObserver(PartsMinMaxObserver):
    """Records the smallest and the largest value of every group or block of a tensor.

    ``granularity``: ``"per_group(size=128)"``, ``"per_group(axis=0, size=32)"``,
    ``"per_block(shape=[64, 128])"`` or its ``Granularity``. The other arguments are those of the base
    class; the scheme is a per-channel one, which says whether zero points are fixed. ``calculate_qparams``
    gives tensors in the shape of the grid of blocks, zero points in the storage of the dtype.

    Values that are not finite leave a range unchanged. Raises ConfigError for a tensor that the blocks do
    not divide. Merging is exact.

    >>> observer = BlockMinMaxObserver("per_group(size=2)", dtype=INT4)
    >>> _ = observer(torch.tensor([[-1.5, 0.75, 3.0, 0.0]]))
    >>> observer.calculate_qparams()
    (tensor([[0.2000, 0.4000]]), tensor([[0, 0]], dtype=torch.int8))
    """

    def __init__(
        self,
        granularity: Granularity | str = "per_group(size=128)",
        dtype: torch.dtype = INT4,
        qscheme: torch.qscheme = torch.per_channel_symmetric,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = EPS,
        is_dynamic: bool = False,
    ) -> None:
        self._check(granularity, qscheme, is_dynamic)
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps)
        self.granularity = str(granularity)
        self._forget_shapes(factory_kwargs)

    @classmethod
    def _check(cls, given: Granularity | str, qscheme: torch.qscheme, is_dynamic: bool) -> None:
        granularity = Granularity.parse(str(given))
        sized = granularity.size is not None or granularity.shape is not None
        if not granularity.has_blocks or not sized or is_dynamic:
            raise ConfigError(
                f"{cls.__name__} measures groups or blocks of a known size, ahead of inference",
                where=f"{cls.__name__}(granularity={str(given)!r}, is_dynamic={is_dynamic})",
                fix='granularity="per_group(size=128)" or "per_block(shape=[64, 128])"',
            )
        if not is_per_channel(qscheme) or qscheme == torch.per_channel_affine_float_qparams:
            raise ConfigError(
                f"{cls.__name__} measures many ranges and was requested with {qscheme}",
                where=f"{cls.__name__}(qscheme={qscheme})",
                fix="use torch.per_channel_symmetric or torch.per_channel_affine",
            )

    def _ranges(self, x: Tensor) -> FiniteRange:
        blocks = self._blocks(x)
        finite = torch.isfinite(blocks)
        ignored = int(blocks.numel() - finite.sum())
        low = torch.where(finite, blocks, torch.inf).amin(-1) if ignored else blocks.amin(-1)
        high = torch.where(finite, blocks, -torch.inf).amax(-1) if ignored else blocks.amax(-1)
        return FiniteRange(low, high, ignored)

    def _blocks(self, x: Tensor) -> Tensor:
        """``x`` in the shape of the grid, with the values of each block behind."""
        granularity = Granularity.parse(self.granularity)
        wrong = granularity.undivided(x.shape)
        if wrong is not None:
            raise ConfigError(
                f"groups of {wrong.size} do not divide axis {wrong.axis}, which has {wrong.length}",
                where=f"{type(self).__name__}({self.granularity!r}), weight {list(x.shape)}",
                fix=f"groups of {wrong.nearest}, or leave the layer in float",
            )
        block = granularity.block(x.shape)
        sides = [side for n, b in zip(x.shape, block, strict=True) for side in (n // b, b)]
        split = x.reshape(sides)
        grid, inside = range(0, split.dim(), 2), range(1, split.dim(), 2)
        return split.permute(*grid, *inside).flatten(x.dim())

    def _check_parts(self, low: Tensor) -> None:
        if self.min_val.shape != low.shape:
            raise ConfigError(
                f"one observer saw {list(self.min_val.shape)} and {list(low.shape)} blocks",
                where=f"{type(self).__name__}({self.granularity!r})",
                fix="an observer for each weight",
            )

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point, in the shape of the grid; 1 and 0, warned, before any data."""
        scale, zero_point = super().calculate_qparams()
        storage = QParams(0.0, 0, 0, 0, self.dtype).storage
        return scale, zero_point.to(torch.int8 if storage.is_floating_point else storage)

    def _merge_settings(self) -> dict[str, Any]:
        return {**super()._merge_settings(), "granularity": self.granularity}

    def extra_repr(self) -> str:
        return f"{self.granularity}, blocks={list(self.min_val.shape)}"


class BlockMSEObserver(BlockMinMaxObserver):
    """Chooses for every block the range whose quantized values have the least squared error.

    Ranges from the full one down to a fifth of it are tried: a smaller range clips the largest values and
    rounds the others more finely. Only the last tensor counts; ``merge`` raises ConfigError.

    >>> whole, clipped = (made("per_group(size=8)", dtype=INT4)
    ...                   for made in (BlockMinMaxObserver, BlockMSEObserver))
    >>> x = torch.tensor([[0.1, -0.1, 0.1, -0.1, 0.1, -0.1, 0.1, -0.2]])
    >>> [bool(o(x) is x) for o in (whole, clipped)]
    [True, True]
    >>> bool(clipped.calculate_qparams()[0] <= whole.calculate_qparams()[0])
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """Choose the range of every block of ``x``; returns ``x``."""
        if x.numel() == 0:
            return x
        values = x.detach().to(self.min_val.dtype)
        low, high, ignored = self._ranges(values)
        self.ignored += ignored
        blocks = self._blocks(torch.nan_to_num(values, 0.0, 0.0, 0.0))
        best = torch.full_like(low, torch.inf)
        kept_low, kept_high = low.clone(), high.clone()
        for step in range(_SHRINKS):
            part = 1.0 - _STEP * step
            error = self._error(blocks, low * part, high * part)
            better = error < best
            best = torch.where(better, error, best)
            kept_low = torch.where(better, low * part, kept_low)
            kept_high = torch.where(better, high * part, kept_high)
        self._set_range(kept_low, kept_high)
        return x

    def _error(self, blocks: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """The squared error of every block when it is quantized in this range."""
        scale, zero_point = (each.unsqueeze(-1) for each in self._calculate_qparams(low, high))
        block = (*(1,) * low.dim(), blocks.shape[-1])
        ends = self.quant_min, self.quant_max
        qparams = QParams(scale, zero_point, *ends, self.dtype, block=block)
        rounded = dequantize_tensor(
            quantize_tensor(blocks, qparams), scale, zero_point, block=block
        )
        return (rounded - blocks).square().sum(-1)

    def _absorb(self, other: PartsMinMaxObserver) -> None:  # noqa: ARG002
        raise ConfigError(
            "BlockMSEObserver cannot be merged: it weighs the values themselves",
            where="BlockMSEObserver.merge",
            fix="let one observer see the whole weight",
        )
