"""The calls that compose the steps: one call from a model to a quantized one, and the steps by name."""

from __future__ import annotations

from backquant.api.export_flow import prepare_export
from backquant.api.exporting import export
from backquant.api.flow import convert_fx, convert_to_reference_fx, fuse_fx, prepare_fx
from backquant.api.one_call import explain, quantize
from backquant.api.qat import prepare_qat_fx
from backquant.calibrate import synchronize_observers

__all__ = [
    "convert_fx",
    "convert_to_reference_fx",
    "explain",
    "export",
    "fuse_fx",
    "prepare_export",
    "prepare_fx",
    "prepare_qat_fx",
    "quantize",
    "synchronize_observers",
]
