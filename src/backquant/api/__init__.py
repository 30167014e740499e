"""The calls that compose the steps: one call from a model to a quantized one, and the steps by name."""

from __future__ import annotations

from backquant.accuracy.search.budget import Budget
from backquant.accuracy.search.result import SearchResult
from backquant.api.accuracy import compare, sensitivity
from backquant.api.checkpoints import load_checkpoint, quantize_checkpoint
from backquant.api.eager import fuse_modules, fuse_modules_qat, quantize_dynamic
from backquant.api.exporting import export
from backquant.api.flow import (
    convert_fx,
    convert_to_integer_reference,
    convert_to_reference_fx,
    fuse_fx,
    prepare_export,
    prepare_fx,
    prepare_qat_fx,
)
from backquant.api.from_files import quantize_files
from backquant.api.one_call import default_mapping, explain, quantize
from backquant.api.parts import PartlyQuantized, load_parts, quantize_parts, save_parts
from backquant.api.search import search
from backquant.calibrate import synchronize_observers
from backquant.calibrate.checkpoint import Checkpoint
from backquant.nn.stubs import DeQuantStub, QuantStub, QuantWrapper
from backquant.pipeline.weight_only import weight_only_mapping

__all__ = [
    "Budget",
    "Checkpoint",
    "DeQuantStub",
    "PartlyQuantized",
    "QuantStub",
    "QuantWrapper",
    "SearchResult",
    "compare",
    "convert_fx",
    "convert_to_integer_reference",
    "convert_to_reference_fx",
    "default_mapping",
    "explain",
    "export",
    "fuse_fx",
    "fuse_modules",
    "fuse_modules_qat",
    "load_checkpoint",
    "load_parts",
    "prepare_export",
    "prepare_fx",
    "prepare_qat_fx",
    "quantize",
    "quantize_checkpoint",
    "quantize_dynamic",
    "quantize_files",
    "quantize_parts",
    "save_parts",
    "search",
    "sensitivity",
    "synchronize_observers",
    "weight_only_mapping",
]
