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
    OutputRecord,
    Structure,
    interface_of,
    maker,
    output_of,
    set_interface,
    set_output,
)

__all__ = [
    "Argument",
    "Call",
    "ExportOptions",
    "ExportedModel",
    "Interface",
    "OutputRecord",
    "Speller",
    "Structure",
    "capture_export",
    "interface_of",
    "load_exported",
    "maker",
    "output_of",
    "set_interface",
    "set_output",
]
