"""Activations and norms on quantized tensors: the settings of the float module, and one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backquant.nn.quantized.scaled import Scaled

_ops: Any = torch.ops.quantized


class ELU(Scaled, nn.ELU):
    """``torch.ops.quantized.elu``."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized to quantized."""
        out: torch.Tensor = _ops.elu(x, self.scale, self.zero_point, self.alpha)
        return out


class Hardswish(Scaled, nn.Hardswish):
    """``torch.ops.quantized.hardswish``."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized to quantized."""
        out: torch.Tensor = _ops.hardswish(x, self.scale, self.zero_point)
        return out


class LeakyReLU(Scaled, nn.LeakyReLU):
    """``torch.ops.quantized.leaky_relu``."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized to quantized."""
        slope = self.negative_slope
        out: torch.Tensor = _ops.leaky_relu(x, slope, False, self.scale, self.zero_point)
        return out


class PReLU(Scaled, nn.PReLU):
    """PReLU; its weight stays float."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized to quantized."""
        y = nn.functional.prelu(x.dequantize(), self.weight)
        return torch.quantize_per_tensor(y, self.scale, self.zero_point, x.dtype)


class Softmax(Scaled, nn.Softmax):
    """``torch.ops.quantized.softmax``."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized to quantized."""
        out: torch.Tensor = _ops.softmax(x, self.dim, self.scale, self.zero_point)
        return out


class Dropout(Scaled, nn.Dropout):
    """Nothing: models that are quantized do not train."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The input."""
        return x

    def _scaled(self, scale: Any, zero_point: Any) -> None:
        """It has none, as in PyTorch: the result has that of the input."""

    def _qparams_repr(self) -> str:
        return ""


class LayerNorm(Scaled, nn.LayerNorm):
    """``torch.ops.quantized.layer_norm``."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized to quantized."""
        settings = (list(self.normalized_shape), self.weight, self.bias, self.eps)
        out: torch.Tensor = _ops.layer_norm(x, *settings, self.scale, self.zero_point)
        return out


class GroupNorm(Scaled, nn.GroupNorm):
    """``torch.ops.quantized.group_norm``."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized to quantized."""
        settings = (self.num_groups, self.weight, self.bias, self.eps)
        out: torch.Tensor = _ops.group_norm(x, *settings, self.scale, self.zero_point)
        return out


class _InstanceNorm(Scaled):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized to quantized."""
        norm: Any = self
        settings = (norm.weight, norm.bias, norm.eps)
        out: torch.Tensor = _ops.instance_norm(x, *settings, self.scale, self.zero_point)
        return out


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """``torch.ops.quantized.instance_norm`` of sequences."""


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """``torch.ops.quantized.instance_norm`` of images."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """``torch.ops.quantized.instance_norm`` of volumes."""


class _BatchNorm(Scaled):
    _operator: str

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized to quantized."""
        norm: Any = self
        settings = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
        operator = getattr(_ops, self._operator)
        out: torch.Tensor = operator(x, *settings, self.scale, self.zero_point)
        return out


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """``torch.ops.quantized.batch_norm2d``."""

    _operator = "batch_norm2d"


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """``torch.ops.quantized.batch_norm3d``."""

    _operator = "batch_norm3d"


class _OfSequence(_BatchNorm):
    """Made of the batch norm that stands first in a fused module."""

    @classmethod
    def from_reference(cls: Any, module: Any, scale: Any, zero_point: Any) -> Any:
        """The quantized form of a fused module."""
        return super().from_reference(module[0], scale, zero_point)


class BNReLU2d(_OfSequence, nn.BatchNorm2d):
    """``BatchNorm2d`` and ReLU in one."""

    _operator = "batch_norm2d_relu"


class BNReLU3d(_OfSequence, nn.BatchNorm3d):
    """``BatchNorm3d`` and ReLU in one."""

    _operator = "batch_norm3d_relu"
