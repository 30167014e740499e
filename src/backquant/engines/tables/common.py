"""Rules that every engine's table ends with: torch's own kernels through zero-copy views, operators
that only move integers, and tables of 256 results."""

from __future__ import annotations

from backquant.engines.tables.dynamic import dynamic_linear_rules
from backquant.engines.tables.norm import norm_rules
from backquant.engines.tables.passthrough import embedding_rules, passthrough_rules, recurrent_rules
from backquant.engines.tables.pointwise import (
    binary_rules,
    clamp_rules,
    matrix_rules,
    pointwise_rules,
)
from backquant.engines.tables.pooling import (
    adaptive_rules,
    average_rules,
    max_rules,
    mean_rules,
    resize_rules,
)
from backquant.engines.tables.quantized_weighted import TorchKernels
from backquant.lower.rule import LowerRule


def common_rules(kernels: TorchKernels) -> list[LowerRule]:
    """Rules that all engines of PyTorch share, by preference among those that fit one occurrence;
    ``kernels``: for layers that are quantized at each call.

    >>> len(common_rules(TorchKernels("fbgemm"))) > 20
    True
    """
    return [
        *dynamic_linear_rules(kernels),
        *recurrent_rules(kernels),
        *embedding_rules(),
        *binary_rules(),
        *max_rules(),
        *average_rules(),
        *adaptive_rules(),
        *mean_rules(),
        *norm_rules(),
        *matrix_rules(),
        *clamp_rules(),
        *resize_rules(),
        *passthrough_rules(),
        *pointwise_rules(),
    ]
