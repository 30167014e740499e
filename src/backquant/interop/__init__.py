"""Other libraries' quantization flows with the backends and mappings of this one."""

from __future__ import annotations

from backquant.interop.torch_ao import from_torch_ao, to_torch_ao
from backquant.interop.torch_ao_calibration import with_torch_ao_calibration
from backquant.interop.torchao import as_quantizer

__all__ = ["as_quantizer", "from_torch_ao", "to_torch_ao", "with_torch_ao_calibration"]
