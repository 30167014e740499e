"""Modules that train with a fake-quantized weight and a dynamically quantized activation."""

from __future__ import annotations

from backquant.nn.qat.dynamic.linear import Linear

__all__ = ["Linear"]
