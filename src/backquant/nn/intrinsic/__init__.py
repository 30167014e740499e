"""Fused modules: what fusers make of the patterns that a backend runs as one operator."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from backquant.nn.intrinsic.fused import (
    BNReLU2d,
    BNReLU3d,
    ConvAdd2d,
    ConvAddReLU2d,
    ConvBn1d,
    ConvBn2d,
    ConvBn3d,
    ConvBnReLU1d,
    ConvBnReLU2d,
    ConvBnReLU3d,
    ConvReLU1d,
    ConvReLU2d,
    ConvReLU3d,
    FusedModule,
    LinearBn1d,
    LinearLeakyReLU,
    LinearReLU,
    LinearTanh,
)

if TYPE_CHECKING:
    from backquant.nn.intrinsic import qat

__all__ = [
    "BNReLU2d",
    "BNReLU3d",
    "ConvAdd2d",
    "ConvAddReLU2d",
    "ConvBn1d",
    "ConvBn2d",
    "ConvBn3d",
    "ConvBnReLU1d",
    "ConvBnReLU2d",
    "ConvBnReLU3d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "FusedModule",
    "LinearBn1d",
    "LinearLeakyReLU",
    "LinearReLU",
    "LinearTanh",
    "qat",
]


def __getattr__(name: str) -> Any:
    if name in ("qat", "quantized"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
