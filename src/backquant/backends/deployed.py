"""What the runtimes share that read a reference model as quantize/dequantize nodes: entries, defaults.

Activations are unsigned 8-bit and asymmetric, weights signed 8-bit, symmetric, per output channel: the
form that has integer kernels in ONNX Runtime and in OpenVINO on x86 (others fall back to float, or to
kernels that are slower than float).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import (
    BackendDefaults,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    LeaveFloat,
    QuantDefault,
    Tolerance,
)
from backquant.backends.defaults import FLOAT32, QAT_CHANNEL_WEIGHT, SCORES, SOFTMAX
from backquant.nn import intrinsic
from backquant.operators import named, spellings
from backquant.operators.conv import CONV

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
    leave_float=(WEIGHTS,),
)


# What runtimes with oneDNN inside never finish on integers.
#
# For a depthwise convolution of 16 channels with 14 taps and more along its last axis oneDNN (torch 2.13's
# and OpenVINO 2026.4's) writes code without end where the input has a zero point and the CPU has VNNI: the
# first call, or the compilation, does not return (``docs/kernels.md``).

_ENDLESS = {
    "groups": 16,
    "out_channels": 16,
    "stride[-1]": 1,
    "dilation[-1]": 1,
    "kernel_size[-1]": {"min": 14},
}
_KINDS = {
    kind
    for conv in CONV.values()
    for kind in (
        *(conv.root, conv.relu, conv.qat, conv.relu_qat),
        *(conv.bn, conv.bn_qat, conv.bn_relu, conv.bn_relu_qat),
    )
}
_ADDING = {intrinsic.ConvAdd2d, intrinsic.ConvAddReLU2d}
_FUNCTIONS = {function for conv in CONV.values() for function in conv.functions}
_CONVOLUTIONS = _KINDS | _ADDING | _FUNCTIONS


def that_end(entries: Iterable[BackendPatternConfig]) -> list[BackendPatternConfig]:
    """The entries; those of convolutions do not take what never ends.

    >>> import torch
    >>> conv, linear = (BackendPatternConfig(kind) for kind in (torch.nn.Conv1d, torch.nn.Linear))
    >>> [conv, linear] = that_end([conv, linear])
    >>> linear.where is None
    True
    >>> print(conv.where)
    not (groups = 16, out_channels = 16, stride[-1] = 1, dilation[-1] = 1, kernel_size[-1] ≥ 14)
    """
    found = list(entries)
    for entry in found:
        if _root(entry.pattern) in _CONVOLUTIONS and entry.where is None:
            entry.set_where({"not": _ENDLESS})
    return found


def _root(pattern: Any) -> Any:
    return pattern[0] if isinstance(pattern, tuple) else pattern


# What TensorRT computes at the end of the kernels of convolutions and matrix products, in any precision.


# a pair between a convolution and one of these would keep TensorRT from computing both in one kernel
EPILOGUES: tuple[Any, ...] = tuple(
    spelling
    for name in ("add", "relu", "relu6", "hardtanh", "leaky_relu")
    for spelling in named(name).spellings
)
