"""Fused modules that quantize their input at each call."""

from __future__ import annotations

from backquant.nn.quantized.dynamic import LinearReLU

__all__ = ["LinearReLU"]
