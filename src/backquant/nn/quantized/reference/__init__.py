"""Modules with integer weights that compute in float: what convert puts into a reference model."""

from __future__ import annotations

from backquant.nn.quantized.reference.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from backquant.nn.quantized.reference.linear import Linear
from backquant.nn.quantized.reference.module import ReferenceModule

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Linear",
    "ReferenceModule",
]
