"""What the runtimes share that read a reference model as quantize/dequantize nodes: entries, defaults.

Activations are unsigned 8-bit and asymmetric, weights signed 8-bit, symmetric, per output channel: the
form that has integer kernels in ONNX Runtime and in OpenVINO on x86 (others fall back to float, or to
kernels that are slower than float).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import (
    BackendDefaults,
    DTypeConfig,
    DTypeWithConstraints,
    LeaveFloat,
    QuantDefault,
    Tolerance,
)
from backquant.backends.defaults import QAT_CHANNEL_WEIGHT, RESHAPE, SCORES, SOFTMAX
from backquant.backends.dtypes import FLOAT32
from backquant.operators import spellings

__all__ = [
    "ADDITIONS",
    "AVERAGES",
    "DEPLOYED_DEFAULTS",
    "FLOAT_OUTPUTS",
    "MATMULS",
    "MOVES",
    "POOLS",
    "PRODUCTS",
    "SCORES",
    "SOFTMAX",
    "STATIC",
    "VALUES",
    "WEIGHT",
    "WEIGHT_ONLY",
    "in_groups",
    "tables_in_groups",
]

WEIGHT = DTypeWithConstraints(torch.qint8, symmetric=True)
STATIC = DTypeConfig(torch.quint8, torch.quint8, WEIGHT, torch.float, tolerance=FLOAT32)
VALUES = DTypeConfig(torch.quint8, torch.quint8, tolerance=FLOAT32)
WEIGHT_ONLY = DTypeConfig(torch.float, torch.float, WEIGHT, torch.float)


def in_groups(
    dtype: torch.dtype,
    *,
    affine: bool = False,
    where: dict[str, Any],
    tolerance: Tolerance | None = None,
) -> DTypeConfig:
    """Weights of few bits in groups along the input features, with activations in float."""
    weight = DTypeWithConstraints(dtype, symmetric=not affine, granularity="per_group")
    return DTypeConfig(
        torch.float, torch.float, weight, torch.float, where=where, tolerance=tolerance
    )


def tables_in_groups(dtype: torch.dtype, where: dict[str, Any]) -> DTypeConfig:
    """``weights_in_groups`` for the tables of embeddings."""
    weight = DTypeWithConstraints(dtype, symmetric=True, granularity="per_group")
    return DTypeConfig(torch.float, torch.float, weight, where=where)


ADDITIONS: tuple[Any, ...] = (operator.add, torch.add)
PRODUCTS: tuple[Any, ...] = (operator.mul, torch.mul)
MATMULS: tuple[Any, ...] = (torch.matmul, operator.matmul)

# kernels on integers whose output keeps the input's qparams
AVERAGES: tuple[Any, ...] = spellings("avg_pool1d", "avg_pool2d", "avg_pool3d")
POOLS: tuple[Any, ...] = (
    *spellings("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *spellings("max_pool1d", "max_pool2d", "max_pool3d"),
    *AVERAGES,
)
# values are moved, or clipped at a bound that the integers have anyway
MOVES: tuple[Any, ...] = (
    *spellings("relu", "relu6", "hardtanh", "dropout", "identity", "flatten", "pixel_shuffle"),
    *spellings("permute", "reshape", "squeeze", "transpose", "unsqueeze", "contiguous", "view"),
)

# products: their kernels also give the sums as floats
FLOAT_OUTPUTS: tuple[Any, ...] = (nn.Linear, F.linear, *MATMULS)

# The weights of attention: a softmax on integers takes six times as long as one in float.
WEIGHTS = LeaveFloat(SOFTMAX, before=MATMULS)

DEPLOYED_DEFAULTS = BackendDefaults(
    activation=QuantDefault("histogram", reduce_range=False),
    weight=QuantDefault(
        "per_channel_minmax", dtype=torch.qint8, qscheme=torch.per_channel_symmetric
    ),
    qat_activation=QuantDefault(
        "moving_average_minmax",
        quant_min=0,
        quant_max=255,
        reduce_range=False,
        fake_quantize="fused_moving_average",
    ),
    qat_weight=QAT_CHANNEL_WEIGHT,
    overrides=(RESHAPE,),
    leave_float=(WEIGHTS,),
)
