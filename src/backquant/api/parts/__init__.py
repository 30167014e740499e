"""Models whose own ``forward`` no capture takes: their parts are quantized where they stand."""

from __future__ import annotations

from backquant.api.parts.folder import load_parts, save_parts
from backquant.api.parts.found import PartlyQuantized
from backquant.api.parts.quantize import quantize_parts

__all__ = ["PartlyQuantized", "load_parts", "quantize_parts", "save_parts"]
