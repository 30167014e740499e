"""The reference forms of convolutions, transposed ones too, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from backquant.nn.quantized.reference.module import (
    ReferenceModule,
    bare,
    float_bias,
    float_weight,
    take_bias,
)

_ConvT = TypeVar("_ConvT", bound="_Convolution")
# What the constructors of PyTorch's convolutions set, beside weight and bias.
_SETTINGS = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "transposed",
    "output_padding", "groups", "padding_mode", "_reversed_padding_repeated_twice",
)  # fmt: skip


class _Convolution(ReferenceModule, _ConvNd):
    """The base of all six: building one from its float module."""

    _geometry: tuple[str, ...] = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups",
        "padding_mode",
    )  # fmt: skip

    @classmethod
    def from_float(
        cls: type[_ConvT], float_conv: nn.Module, weight_qparams: Mapping[str, Any]
    ) -> _ConvT:
        """Quantize the weight of ``float_conv``, which is left as it is and shares nothing.

        Raises ``ConfigError`` for qparams that do not fit its weight.
        """
        weight, bias = float_weight(float_conv), float_bias(float_conv)
        if isinstance(float_conv, _ConvNd):
            reference = bare(cls, {name: getattr(float_conv, name) for name in _SETTINGS})
        else:
            geometry = {name: getattr(float_conv, name) for name in cls._geometry}
            reference = cls(**geometry, bias=bias is not None, device="meta")
        reference._store_weight(weight, weight_qparams)
        take_bias(reference, bias)
        reference.train(float_conv.training)
        return reference


class _Conv(_Convolution):
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight_qparams: Mapping[str, Any] | None = None,
    ) -> None:
        init: Callable[..., None] = super().__init__  # of nn.Conv1d, nn.Conv2d or nn.Conv3d
        size = (in_channels, out_channels, kernel_size)
        init(*size, stride, padding, dilation, groups, bias, padding_mode, device, dtype)
        self._store_weight(self.weight, weight_qparams)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input ``(N, C_in, *)`` or ``(C_in, *)`` float, output the same with ``C_out``.

        ``padding_mode`` is applied; PyTorch's reference convolutions drop it and pad with zeros.
        """
        return self._conv_forward(x, self.dequantized_weight(), self.bias)


class Conv1d(_Conv, nn.Conv1d):
    """``torch.nn.Conv1d`` on an integer weight; its arguments, then ``weight_qparams``.

    >>> Conv1d(2, 4, 3).weight.dtype, Conv1d(2, 4, 3)(torch.zeros(1, 2, 5)).shape
    (torch.uint8, torch.Size([1, 4, 3]))
    """


class Conv2d(_Conv, nn.Conv2d):
    """``torch.nn.Conv2d`` on an integer weight; its arguments, then ``weight_qparams``.

    >>> qparams = {"qscheme": torch.per_channel_affine, "dtype": torch.qint8, "axis": 0,
    ...            "scale": torch.full((4,), 0.01), "zero_point": torch.zeros(4)}
    >>> reference = Conv2d.from_float(nn.Conv2d(2, 4, 3), qparams)
    >>> reference.weight.dtype, reference(torch.zeros(1, 2, 5, 5)).shape
    (torch.int8, torch.Size([1, 4, 3, 3]))
    """


class Conv3d(_Conv, nn.Conv3d):
    """``torch.nn.Conv3d`` on an integer weight; its arguments, then ``weight_qparams``.

    >>> Conv3d(1, 2, 1)(torch.zeros(1, 1, 2, 2, 2)).shape
    torch.Size([1, 2, 2, 2, 2])
    """


class _ConvTranspose(_Convolution, _ConvTransposeNd):
    """Transposed: the weight is ``(C_in, C_out / groups, *)``, output channels are along axis 1."""

    _geometry = (*_Convolution._geometry, "output_padding")
    _dimensions: int
    _operator: Callable[..., torch.Tensor]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight_qparams: Mapping[str, Any] | None = None,
    ) -> None:
        init: Callable[..., None] = super().__init__  # of nn.ConvTranspose1d, 2d or 3d
        size, like = (in_channels, out_channels, kernel_size), (device, dtype)
        init(*size, stride, padding, output_padding, groups, bias, dilation, padding_mode, *like)
        self._store_weight(self.weight, weight_qparams)

    def forward(self, x: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """Input ``(N, C_in, *)`` float, output ``(N, C_out, *)`` float.

        ``output_size`` chooses among the sizes that a stride above 1 allows; PyTorch's reference
        modules raise on it.
        """
        output_padding = self._output_padding(
            x,
            output_size,
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.kernel_size,  # type: ignore[arg-type]
            self._dimensions,
            self.dilation,  # type: ignore[arg-type]
        )
        return type(self)._operator(
            x,
            self.dequantized_weight(),
            self.bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
        )


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` on an integer weight; its arguments, then ``weight_qparams``.

    >>> ConvTranspose1d(2, 4, 3)(torch.zeros(1, 2, 5)).shape
    torch.Size([1, 4, 7])
    """

    _dimensions = 1
    _operator = F.conv_transpose1d


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` on an integer weight; its arguments, then ``weight_qparams``.

    >>> ConvTranspose2d(1, 2, 3, stride=2)(torch.zeros(1, 1, 2, 2), output_size=[6, 6]).shape
    torch.Size([1, 2, 6, 6])
    """

    _dimensions = 2
    _operator = F.conv_transpose2d


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d`` on an integer weight; its arguments, then ``weight_qparams``.

    >>> ConvTranspose3d(1, 2, 1)(torch.zeros(1, 1, 2, 2, 2)).shape
    torch.Size([1, 2, 2, 2, 2])
    """

    _dimensions = 3
    _operator = F.conv_transpose3d
