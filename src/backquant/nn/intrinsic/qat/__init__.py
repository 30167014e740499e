"""Fused modules in quantization-aware training."""

from __future__ import annotations

from backquant.nn.intrinsic.qat.batch_norm import freeze_bn_stats, update_bn_stats
from backquant.nn.intrinsic.qat.conv import (
    ConvBn1d,
    ConvBn2d,
    ConvBn3d,
    ConvBnReLU1d,
    ConvBnReLU2d,
    ConvBnReLU3d,
    ConvReLU1d,
    ConvReLU2d,
    ConvReLU3d,
)
from backquant.nn.intrinsic.qat.linear import LinearBn1d, LinearReLU

__all__ = [
    "ConvBn1d",
    "ConvBn2d",
    "ConvBn3d",
    "ConvBnReLU1d",
    "ConvBnReLU2d",
    "ConvBnReLU3d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "LinearBn1d",
    "LinearReLU",
    "freeze_bn_stats",
    "update_bn_stats",
]
