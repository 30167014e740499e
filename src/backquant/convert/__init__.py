"""Conversion: observers become quantize/dequantize nodes, weights become integers."""

from __future__ import annotations

from backquant.convert.custom_modules import dequantize_all
from backquant.convert.interface import (
    IntegerEdges,
    integer_edges,
    keep_integers,
    with_integer_edges,
)
from backquant.convert.reference import convert_to_reference
from backquant.convert.state import ConvertRequest, Kept, ReferenceModel, as_it_is, reference_state
from backquant.convert.weights import original_weights

__all__ = [
    "ConvertRequest",
    "IntegerEdges",
    "Kept",
    "ReferenceModel",
    "as_it_is",
    "convert_to_reference",
    "dequantize_all",
    "integer_edges",
    "keep_integers",
    "original_weights",
    "reference_state",
    "with_integer_edges",
]
