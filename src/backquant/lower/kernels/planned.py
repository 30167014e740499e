"""Convolutions and linear layers by the library of kernels (``backquant.native``), where it is here.

A kernel module has one ``Planned``, which says whether the library computes it, and holds its plan: made at
the first call, dropped with everything else that was made from the weights. Whether it is used depends on the
library, the CPU and the layer, and on nothing else: a model gives the same bits recorded or not, with any
number of threads. Elsewhere, and for other layers, PyTorch's kernels run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from backquant.lower.kernels.packed import PackedKernel
from backquant.lower.kernels.prepared import channels_last, is_plain
from backquant.lower.kernels.zero_point import fold_zero_point
from backquant.native.library import is_here, layout
from backquant.native.plan import Result, Shape, has_tiles, is_known, plan


@dataclass(frozen=True)
class Weights:
    """Weight, scales and bias of one operator."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def folded(self, x_scale: float, zero_point: int) -> torch.Tensor:
        """The bias that makes up for the zero point of the input."""
        found = fold_zero_point(self.weight, self.scale, self.bias, x_scale, zero_point)
        return torch.zeros(self.weight.shape[0]) if found is None else found


class Planned:
    """How the library computes one kernel module. ``other``: qparams of what is added.

    ``dims``: spatial dimensions; one is computed as an image of one line.
    """

    def __init__(
        self,
        dims: int,
        shape: Shape,
        x: tuple[float, int],
        result: Result,
        other: tuple[float, int] | None = None,
    ) -> None:
        self.dims, self.shape, self.x, self.result, self.other = dims, shape, x, result, other
        self._plans: dict[tuple[()], torch.Tensor] = {}
        self.is_precise = True  # whether its folded zero point is: ``rounds_within``

    @cached_property
    def is_known(self) -> bool:
        """Whether the library computes it, here or elsewhere: depthwise convolutions add nothing."""
        adds = self.shape.depthwise and self.other is not None
        return self.dims < 3 and not adds and is_known(self.shape, self.result)

    @property
    def is_used(self) -> bool:
        """Whether the library computes it here: where the CPU has AMX and the library does not use it,
        products are oneDNN's."""
        if not (self.is_known and self.is_precise and is_here()):
            return False
        return self.shape.depthwise or layout().tiles or not has_tiles()

    def named(self, otherwise: str) -> str:
        """The name of the kernel that runs here: the library's, or the one that runs without it."""
        if not self.is_used:
            return otherwise
        if self.shape.depthwise:
            return "backquant.depthwise"
        return "backquant.convolution" if self.dims else "backquant.linear"

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the library computes it on ``x``."""
        return self.is_used and is_plain(x) and x.dtype == torch.uint8

    def plan_of(self, kernel: PackedKernel) -> torch.Tensor:
        """The plan for the weights that ``kernel`` holds."""
        found = self._plans.get(())
        if found is None:
            weight, channels = kernel.weight, kernel.weight.shape[0]
            scale = kernel.weight_scale.expand(channels).contiguous()
            weights = Weights(weight, scale, kernel.bias)
            made = plan(self.shape, weights, self.x, self.result, self.other, layout())
            found = self._plans.setdefault((), made)
        return found

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a recording reads."""
        return tuple(self._plans.values())

    def drop(self) -> None:
        """The weights may have changed."""
        self._plans = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plans": {}}

    def convolution(self, kernel: PackedKernel, x: torch.Tensor) -> torch.Tensor:
        """Of an image ``[batch, in, height, width]``, or a line."""
        run: Callable[..., torch.Tensor] = torch.ops.backquant_kernels.convolution.default
        if self.dims == 1:
            return run(channels_last(x.unsqueeze(2)), self.plan_of(kernel)).squeeze(2)
        return run(channels_last(x), self.plan_of(kernel))

    def convolution_add(
        self, kernel: PackedKernel, x: torch.Tensor, other: torch.Tensor
    ) -> torch.Tensor:
        """The same, and ``other`` ``[batch, out, height, width]`` added."""
        run = torch.ops.backquant_kernels.convolution_add.default
        made: torch.Tensor = run(channels_last(x), channels_last(other), self.plan_of(kernel))
        return made

    def linear(self, kernel: PackedKernel, x: torch.Tensor) -> torch.Tensor:
        """Of rows ``[..., in]``."""
        made: torch.Tensor = torch.ops.backquant_kernels.linear.default(
            x.contiguous(), self.plan_of(kernel)
        )
        return made
