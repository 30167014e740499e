"""Convolutions on plain integer tensors by oneDNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backquant.lower.kernels.packed import PackedKernel, WeightTensors

__all__ = ["ConvConfig", "OnednnConv"]


@dataclass(frozen=True)
class ConvConfig:
    """All numbers of one convolution. ``out_dtype`` float32 gives a float result (scale 1, zero
    point 0). The tuples have one entry per spatial dimension, at most three."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    x_scale: float
    x_zero_point: int
    out_scale: float
    out_zero_point: int
    out_dtype: torch.dtype
    post_op: str = "none"
    post_numbers: tuple[float, ...] = ()
    post_algorithm: str = ""


class OnednnConv(PackedKernel):
    """``onednn::qconv_pointwise``: 1d, 2d or 3d convolution, bias and one unary operator.

    Takes uint8 ``[batch, in, ...]`` of any batch and spatial size, in any memory format (channels
    last is the fast one), and returns ``[batch, out, ...]`` of ``config.out_dtype``, channels last.
    The weight is int8 ``[out, in / groups, ...]`` with zero points 0.

    >>> config = ConvConfig((1, 1), (0, 0), (1, 1), 1, 0.5, 10, 0.5, 0, torch.uint8, "relu")
    >>> one = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    >>> tensors = WeightTensors(one, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    >>> kernel = OnednnConv(config, tensors)
    >>> kernel(torch.tensor([[[[8, 14]]]], dtype=torch.uint8)).flatten()
    tensor([0, 4], dtype=torch.uint8)
    """

    config_class = ConvConfig
    kernel = "onednn.qconv_pointwise"
    config: ConvConfig

    def __init__(self, config: ConvConfig, tensors: WeightTensors) -> None:
        super().__init__(config, tensors)

    @property
    def name(self) -> str:
        kernel = f"onednn.qconv{len(self.config.stride)}d_pointwise"
        return kernel if self.config.post_op == "none" else f"{kernel}({self.config.post_op})"

    def _pack(self) -> Any:
        c = self.config
        # With the geometry, but without a shape: any batch and spatial size is admitted.
        packed = torch.ops.onednn.qconv_prepack(
            self.weight,
            self.weight_scale,
            c.x_scale,
            c.x_zero_point,
            list(c.stride),
            list(c.padding),
            list(c.dilation),
            c.groups,
            None,
        )
        self._before = (c.x_scale, c.x_zero_point)
        self._after = (
            list(c.stride),
            list(c.padding),
            list(c.dilation),
            c.groups,
            c.out_scale,
            c.out_zero_point,
            c.out_dtype,
            c.post_op,
            list(c.post_numbers),
            c.post_algorithm,
        )
        return packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """uint8 ``[batch, in, ...]`` to ``[batch, out, ...]``."""
        packed = self._packed if self._packed is not None else self._repack()
        out: torch.Tensor = torch.ops.onednn.qconv_pointwise.default(
            x,
            *self._before,
            packed,
            self.weight_scale,
            self.weight_zero_point,
            self.bias,
            *self._after,
        )
        return out
