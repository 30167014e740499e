"""Conversion: observers become quantize/dequantize nodes, weights become integers."""

from __future__ import annotations

from backquant.convert.measured import Measured
from backquant.convert.reference import convert_to_reference
from backquant.convert.state import ReferenceModel, ReferenceState, reference_state

__all__ = [
    "Measured",
    "ReferenceModel",
    "ReferenceState",
    "convert_to_reference",
    "reference_state",
]
