"""inductor_x86: TorchInductor's int8 kernels on x86 CPUs, by way of torch.compile and AOTInductor.

Source: torch 2.13, ``torch/_inductor/fx_passes/quantization.py``; counted in the code it generates.

1. Activations are unsigned 8-bit, weights signed 8-bit with one scale per output channel: only these
   become oneDNN's ``qconv`` and ``qlinear``. Biases stay float. Convolutions in 3d are computed in float.
2. A convolution takes a following ReLU, ReLU6, Hardtanh or Hardswish, and an addition (with ReLU) into its
   kernel; a linear layer ReLU.
3. A result that only float operators read stays float: the kernels write either.
4. Everything else is generated code: integers that are moved stay integers; arithmetic on integers
   between float neighbours would only add conversions.
5. Linear layers also run dynamically.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    LeaveFloat,
    QDQRules,
    QuantDefault,
)
from backquant.backends.defaults import (
    AT_EACH_CALL,
    CHANNEL_WEIGHT,
    CONVOLUTIONS,
    FLOAT32,
    QAT_CHANNEL_WEIGHT,
)
from backquant.backends.deployed import that_end
from backquant.graph.grouped import grouped_linear
from backquant.nn import intrinsic
from backquant.nn.quantized import reference
from backquant.operators import (
    clamped,
    conv,
    conv_add,
    elementwise,
    grouped,
    linear,
    shape,
    spellings,
)
from backquant.operators.entry import admit, observed, swapped

WEIGHT = DTypeWithConstraints(torch.qint8, symmetric=True, granularity="per_channel", ch_axis=0)
DIMENSIONS = (1, 2)  # of convolutions on integers
STATIC = DTypeConfig(torch.quint8, torch.quint8, WEIGHT, torch.float, tolerance=FLOAT32)
DYNAMIC = DTypeConfig(
    torch.quint8, torch.float, WEIGHT, torch.float, is_dynamic=True, tolerance=AT_EACH_CALL
)
VALUES = DTypeConfig(torch.quint8, torch.quint8, tolerance=FLOAT32)

ADDITIONS: tuple[Any, ...] = (operator.add, torch.add)
ADDED: tuple[Any, ...] = (intrinsic.ConvAdd2d, intrinsic.ConvAddReLU2d)
AFTER_CONVOLUTION: tuple[Any, ...] = spellings("hardswish")
SHARING: tuple[Any, ...] = (
    *spellings("relu", "dropout", "adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"),
    *spellings("flatten", "identity", "permute", "reshape", "transpose", "contiguous", "view"),
)
DEFAULTS = BackendDefaults(
    activation=QuantDefault("histogram", reduce_range=False),
    weight=CHANNEL_WEIGHT,
    qat_activation=QuantDefault(
        "moving_average_minmax",
        quant_min=0,
        quant_max=255,
        reduce_range=False,
        fake_quantize="fused_moving_average",
    ),
    qat_weight=QAT_CHANNEL_WEIGHT,
)


def backend_config() -> BackendConfig:
    """What TorchInductor computes on integers on x86.

    >>> config = backend_config()
    >>> config.name, config.engine, [rule.results for rule in config.qdq.leave_float]
    ('inductor_x86', None, [True, False])
    """
    weighted = (*CONVOLUTIONS, *ADDED, nn.Linear, F.linear, grouped_linear)
    rules = QDQRules(
        columns="integer_lines",
        leave_float=(
            LeaveFloat(weighted, results=True),
            LeaveFloat((*ADDITIONS, *shape.CAT, *SHARING), unless_between_quantized=True),
        ),
    )
    return (
        BackendConfig("inductor_x86")
        .set_defaults(DEFAULTS)
        .set_qdq(rules)
        .set_backend_pattern_configs(
            [
                *that_end(
                    e for d in DIMENSIONS for e in admit(conv.conv_entries(conv.CONV[d]), [STATIC])
                ),
                *that_end(conv_add.entries([STATIC])),
                *linear.entries([STATIC, DYNAMIC]),
                *grouped.entries([STATIC, DYNAMIC]),
                *that_end(clamped.entries([STATIC], dimensions=DIMENSIONS)),
                *that_end(admit(_activated(), [STATIC])),
                *elementwise.binary_entries([VALUES], ADDITIONS),
                *shape.cat_entries([VALUES], shape.CAT),
                *shape.sharing_entries([VALUES], SHARING),
            ]
        )
    )


def _activated() -> list[BackendPatternConfig]:
    """Rule 2: what is observed behind the activation."""
    rows = []
    for activation in AFTER_CONVOLUTION:
        rows.append(swapped((nn.Conv2d, activation), nn.Conv2d, reference.Conv2d))
        rows.append(observed((F.conv2d, activation)))
    return rows
