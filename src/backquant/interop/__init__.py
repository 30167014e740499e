"""Other libraries' quantization flows with the backends and mappings of this one."""

from __future__ import annotations

from backquant.interop.torch_ao import from_torch_ao, to_torch_ao
from backquant.interop.torchao import as_quantizer
from backquant.interop.transformers import as_generator, decoder_inputs, decoder_shapes

__all__ = [
    "as_generator",
    "as_quantizer",
    "decoder_inputs",
    "decoder_shapes",
    "from_torch_ao",
    "to_torch_ao",
]
