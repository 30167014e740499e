"""Dtype configs that several of PyTorch's engines admit, by the kind of operator.

Static: activations and weights are quantized ahead. Dynamic: the activation is quantized at each
call. Weight only: activations stay float.
"""

from __future__ import annotations

import torch

from backquant.backend_config import DTypeConfig, DTypeWithConstraints

__all__ = [
    "DYNAMIC_FLOAT16",
    "DYNAMIC_INT8",
    "FLOAT_WEIGHT_QUINT8",
    "QUINT8",
    "SYMMETRIC_QINT8",
    "WEIGHTED_QUINT8",
    "WEIGHTED_SYMMETRIC_QINT8",
    "WEIGHT_ONLY_QUINT4X2",
    "WEIGHT_ONLY_QUINT8",
    "XNNPACK_ACTIVATION",
    "XNNPACK_WEIGHT",
]

# static, unsigned 8-bit activations
QUINT8 = DTypeConfig(torch.quint8, torch.quint8)
WEIGHTED_QUINT8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
# norms: their kernels take the weight in float
FLOAT_WEIGHT_QUINT8 = DTypeConfig(torch.quint8, torch.quint8, torch.float, torch.float)

# dynamic
DYNAMIC_INT8 = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
DYNAMIC_FLOAT16 = DTypeConfig(
    torch.float16, torch.float, torch.float16, torch.float, is_dynamic=True
)

# weight only
WEIGHT_ONLY_QUINT8 = DTypeConfig(torch.float, torch.float, torch.quint8)
WEIGHT_ONLY_QUINT4X2 = DTypeConfig(torch.float, torch.float, torch.quint4x2)

# XNNPACK: the scale of requantization has a lower bound, and -128 is no weight
XNNPACK_ACTIVATION = DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-12)
XNNPACK_WEIGHT = DTypeWithConstraints(
    torch.qint8,
    quant_min_lower_bound=-127,
    quant_max_upper_bound=127,
    scale_min_lower_bound=2**-12,
)
SYMMETRIC_QINT8 = DTypeConfig(XNNPACK_ACTIVATION, XNNPACK_ACTIVATION)
WEIGHTED_SYMMETRIC_QINT8 = DTypeConfig(
    XNNPACK_ACTIVATION, XNNPACK_ACTIVATION, XNNPACK_WEIGHT, torch.float
)
