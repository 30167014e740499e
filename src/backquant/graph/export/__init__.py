"""Capture by ``torch.export``, in the spelling of a symbolic trace."""

from __future__ import annotations

from backquant.graph.export.capture import ExportOptions, capture_export
from backquant.graph.export.exported import ExportedModel, load_exported
from backquant.graph.export.spelling import Call, Speller
from backquant.graph.export.structure import (
    Interface,
    OutputRecord,
    Structure,
    interface_of,
    set_interface,
)

__all__ = [
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
    "set_interface",
]
