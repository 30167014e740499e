"""Capture by ``torch.export``, in the spelling of a symbolic trace."""

from __future__ import annotations

from backquant.graph.export.capture import (
    ExportedModel,
    ExportOptions,
    capture_export,
    load_exported,
)
from backquant.graph.export.lift import Call, Speller
from backquant.graph.structure import (
    Argument,
    Interface,
    Maker,
    OutputRecord,
    Structure,
    interface_of,
    output_of,
)

__all__ = [
    "Argument",
    "Call",
    "ExportOptions",
    "ExportedModel",
    "Interface",
    "Maker",
    "OutputRecord",
    "Speller",
    "Structure",
    "capture_export",
    "interface_of",
    "load_exported",
    "output_of",
]
