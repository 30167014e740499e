"""Convolutions on quantized tensors, in one to three dimensions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from backquant.nn.quantized.scaled import Weighted


class _Conv(Weighted):
    _operator: ClassVar[str]
    _prepack_name: ClassVar[str]

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    output_padding: tuple[int, ...]

    def _around(self) -> list[int]:
        """What is padded before the kernel, as ``F.pad`` takes it; empty: the kernel does it."""
        if self.padding == "valid" or (
            not isinstance(self.padding, str) and self.padding_mode == "zeros"
        ):
            return []
        sizes = zip(self.kernel_size, self.dilation, strict=True)
        if self.padding == "same":
            whole = [d * (k - 1) for k, d in sizes]
            return [n for w in reversed(whole) for n in (w // 2, w - w // 2)]
        return [n for p in reversed(self.padding) for n in (p, p)]

    def _prepack(self) -> Any:
        inside = isinstance(self.padding, str) or self.padding_mode != "zeros"
        padding = [0] * len(self.kernel_size) if inside else list(self.padding)
        prepack = getattr(torch.ops.quantized, self._prepack_name)
        return prepack(
            self.weight(), self.bias(), list(self.stride), padding, list(self.dilation), self.groups
        )

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Input ``(N, C_in, *)``, output ``(N, C_out, *)``, both quantized."""
        around = self._around()
        if around:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = F.pad(x, around, mode=mode)
        operator = getattr(torch.ops.quantized, self._operator)
        out: torch.Tensor = operator(x, self._packed, self.scale, self.zero_point)
        # qnnpack's clamp gives channels in another order where they lie last
        return out.contiguous()

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._around(), mode=self.padding_mode), 0
        function = getattr(F, f"conv{len(self.kernel_size)}d")
        settings = (self.stride, padding, self.dilation, self.groups)
        out: torch.Tensor = function(x, self.weight().dequantize(), self.bias(), *settings)
        return out

    def extra_repr(self) -> str:
        told = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        told += f", stride={self.stride}, {super()._qparams_repr().rpartition(', qscheme')[0]}"
        for name, usual in (("padding", 0), ("dilation", 1), ("output_padding", 0)):
            value = getattr(self, name)
            if isinstance(value, str) or set(value) != {usual}:
                told += f", {name}={value}"
        told += f", groups={self.groups}" if self.groups != 1 else ""
        told += ", bias=False" if self.bias() is None else ""
        return told if self.padding_mode == "zeros" else f"{told}, padding_mode={self.padding_mode}"


class Conv1d(_Conv):
    """``torch.ops.quantized.conv1d`` with the weight of a reference module."""

    _operator, _prepack_name = "conv1d", "conv1d_prepack"


class Conv2d(_Conv):
    """``torch.ops.quantized.conv2d`` with the weight of a reference module."""

    _operator, _prepack_name = "conv2d", "conv2d_prepack"


class Conv3d(_Conv):
    """``torch.ops.quantized.conv3d`` with the weight of a reference module."""

    _operator, _prepack_name = "conv3d", "conv3d_prepack"


class ConvReLU1d(Conv1d):
    """``Conv1d`` and ReLU in one."""

    _operator = "conv1d_relu"

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float."""
        return super().real(x).relu()


class ConvReLU2d(Conv2d):
    """``Conv2d`` and ReLU in one."""

    _operator = "conv2d_relu"

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float."""
        return super().real(x).relu()


class ConvReLU3d(Conv3d):
    """``Conv3d`` and ReLU in one."""

    _operator = "conv3d_relu"

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float."""
        return super().real(x).relu()


class ConvAdd2d(Conv2d):
    """``Conv2d`` and the sum with a second input: in float, and rounded once."""

    def _computed(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.compute(*inputs)

    def compute(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Both inputs and the output are quantized."""
        return self._plus(x, other, lambda y: y)

    def _plus(self, x: torch.Tensor, other: torch.Tensor, function: Any) -> torch.Tensor:
        y = function(self.real(x.dequantize()) + other.dequantize())
        return torch.quantize_per_tensor(y, self.scale, self.zero_point, x.dtype)


class ConvAddReLU2d(ConvAdd2d):
    """``ConvAdd2d`` and ReLU."""

    def compute(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Both inputs and the output are quantized."""
        return self._plus(x, other, torch.relu)


class _ConvTranspose(_Conv):
    def _prepack(self) -> Any:
        prepack = getattr(torch.ops.quantized, self._prepack_name)
        return prepack(
            self.weight(),
            self.bias(),
            *(list(self.stride), list(self.padding), list(self.output_padding)),
            *(list(self.dilation), self.groups),
        )

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float."""
        function = getattr(F, f"conv_transpose{len(self.kernel_size)}d")
        settings = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        out: torch.Tensor = function(x, self.weight().dequantize(), self.bias(), *settings)
        return out


class ConvTranspose1d(_ConvTranspose):
    """``torch.ops.quantized.conv_transpose1d`` with the weight of a reference module."""

    _operator, _prepack_name = "conv_transpose1d", "conv_transpose1d_prepack"


class ConvTranspose2d(_ConvTranspose):
    """``torch.ops.quantized.conv_transpose2d`` with the weight of a reference module."""

    _operator, _prepack_name = "conv_transpose2d", "conv_transpose2d_prepack"


class ConvTranspose3d(_ConvTranspose):
    """``torch.ops.quantized.conv_transpose3d`` with the weight of a reference module."""

    _operator, _prepack_name = "conv_transpose3d", "conv_transpose3d_prepack"
