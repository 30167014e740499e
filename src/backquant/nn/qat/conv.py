"""Convolutions whose weight is fake-quantized while they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from backquant.nn.qat.weight_fake_quantizer import QATModule

_GEOMETRY = tuple(name for name in _ConvNd.__constants__ if name != "output_padding")


def geometry(conv: nn.Module) -> dict[str, Any]:
    """The constructor arguments of a convolution like ``conv``, without its tensors.

    >>> geometry(nn.Conv2d(1, 2, 3, bias=False))["kernel_size"], geometry(nn.Conv1d(1, 2, 3))["bias"]
    ((3, 3), True)
    """
    arguments = {name: getattr(conv, name) for name in _GEOMETRY}
    return {**arguments, "bias": conv.bias is not None}


class _QATConvNd(QATModule, _ConvNd):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        qconfig: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        init: Callable[..., None] = super().__init__  # of nn.Conv1d, nn.Conv2d or nn.Conv3d
        size = (in_channels, out_channels, kernel_size)
        init(*size, stride, padding, dilation, groups, bias, padding_mode, device, dtype)
        self._attach(qconfig)

    @classmethod
    def _arguments_of(cls, root: nn.Module) -> dict[str, Any]:
        return geometry(root)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the float convolution: ``(N, C_in, *)`` to ``(N, C_out, *)``."""
        return self._conv_forward(input, self.weight_fake_quant(self.weight), self.bias)


class Conv1d(_QATConvNd, nn.Conv1d):
    """``torch.nn.Conv1d`` with ``weight_fake_quant`` from ``qconfig.weight``.

    >>> from types import SimpleNamespace
    >>> conv = Conv1d(1, 2, 3, qconfig=SimpleNamespace(weight=nn.Identity))
    >>> conv(torch.ones(1, 1, 4)).shape, type(conv.to_float()).__name__
    (torch.Size([1, 2, 2]), 'Conv1d')
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = nn.Conv1d
    _ROOT = nn.Conv1d


class Conv2d(_QATConvNd, nn.Conv2d):
    """``torch.nn.Conv2d`` with ``weight_fake_quant`` from ``qconfig.weight``.

    >>> from types import SimpleNamespace
    >>> conv = nn.Conv2d(1, 2, 3)
    >>> conv.qconfig = SimpleNamespace(weight=nn.Identity)
    >>> Conv2d.from_float(conv).weight is conv.weight
    True
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = nn.Conv2d
    _ROOT = nn.Conv2d


class Conv3d(_QATConvNd, nn.Conv3d):
    """``torch.nn.Conv3d`` with ``weight_fake_quant`` from ``qconfig.weight``.

    >>> from types import SimpleNamespace
    >>> Conv3d(1, 2, 1, qconfig=SimpleNamespace(weight=nn.Identity))(torch.ones(1, 1, 2, 2, 2)).shape
    torch.Size([1, 2, 2, 2, 2])
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = nn.Conv3d
    _ROOT = nn.Conv3d
