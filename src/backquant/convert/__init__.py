"""Conversion: observers become quantize/dequantize nodes, weights become integers."""

from __future__ import annotations

from backquant.convert.custom_modules import dequantize_all
from backquant.convert.original_weights import original_weights
from backquant.convert.reference import convert_to_reference
from backquant.convert.request import ConvertRequest, Kept, as_it_is
from backquant.convert.state import ReferenceModel, reference_state

__all__ = [
    "ConvertRequest",
    "Kept",
    "ReferenceModel",
    "as_it_is",
    "convert_to_reference",
    "dequantize_all",
    "original_weights",
    "reference_state",
]
