"""What differs between torch's quantized engines, for the tables that call their kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TorchKernels:
    """The kernels of one of torch's quantized engines (``torch.backends.quantized.supported_engines``).

    ``engine``: the one that weights are packed for. ``transposed``: the one whose transposed convolutions are
    called. What is quantized at each call:

    1. ``reduces_modules``, ``reduces_functions``: the kernels of modules (linear and recurrent layers) and
       that of ``F.linear`` quantize inputs to 7 bits, whatever range was asked for.
    2. ``has_7_bits``: 7 bits can be asked for.
    3. ``affine_weights``: zero points of weights may differ from 0.

    >>> TorchKernels("fbgemm").transposed
    'fbgemm'
    """

    engine: str
    transposed: str = "fbgemm"
    reduces_modules: bool = True
    reduces_functions: bool = True
    has_7_bits: bool = True
    affine_weights: bool = True
