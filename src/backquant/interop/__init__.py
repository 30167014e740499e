"""Other libraries' quantization flows with the backends and mappings of this one."""

from __future__ import annotations

from backquant.interop.torchao import as_quantizer

__all__ = ["as_quantizer"]
