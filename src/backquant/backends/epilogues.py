"""What TensorRT computes at the end of the kernels of convolutions and matrix products, in any precision."""

from __future__ import annotations

from typing import Any

from backquant.operators import named

# a pair between a convolution and one of these would keep TensorRT from computing both in one kernel
EPILOGUES: tuple[Any, ...] = tuple(
    spelling
    for name in ("add", "relu", "relu6", "hardtanh", "leaky_relu")
    for spelling in named(name).spellings
)
