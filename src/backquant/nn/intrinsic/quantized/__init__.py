"""Fused modules on quantized tensors: what fused float modules are in a converted model."""

from __future__ import annotations

from backquant.nn.quantized.conv import (
    ConvAdd2d,
    ConvAddReLU2d,
    ConvReLU1d,
    ConvReLU2d,
    ConvReLU3d,
)
from backquant.nn.quantized.functions import BNReLU2d, BNReLU3d
from backquant.nn.quantized.linear import LinearLeakyReLU, LinearReLU, LinearTanh

__all__ = [
    "BNReLU2d",
    "BNReLU3d",
    "ConvAdd2d",
    "ConvAddReLU2d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "LinearLeakyReLU",
    "LinearReLU",
    "LinearTanh",
]
