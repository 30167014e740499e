"""executorch: models for ExecuTorch's XNNPACK delegate.

The signed form (weights within [-127, 127], scales of at least 2**-12) comes first, the unsigned
one second; linear layers also dynamically. No engine of PyTorch runs it: the result is the
reference model. These are PyTorch's claims; the delegate refuses the unsigned form: `xnnpack` is what it
keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.backends.defaults import (
    DYNAMIC_FLOAT16,
    DYNAMIC_INT8,
    EXECUTORCH_DEFAULTS,
    QUINT8,
    SYMMETRIC_QINT8,
    WEIGHT_ONLY_QUINT8,
    WEIGHTED_QUINT8,
    WEIGHTED_SYMMETRIC_QINT8,
    XNNPACK_ACTIVATION,
    XNNPACK_WEIGHT,
)
from backquant.operators import conv, elementwise, embedding, linear, shape
from backquant.operators.entry import admit, observed

WEIGHTED = [WEIGHTED_SYMMETRIC_QINT8, WEIGHTED_QUINT8]
PLAIN = [SYMMETRIC_QINT8, QUINT8]
DYNAMIC_QINT8 = DTypeConfig(
    XNNPACK_ACTIVATION, torch.float, XNNPACK_WEIGHT, torch.float, is_dynamic=True
)

SHARING: tuple[Any, ...] = (
    nn.Flatten,
    F.adaptive_avg_pool2d,
    F.elu,
    F.hardtanh,
    F.max_pool2d,
    F.pad,
    F.relu,
    F.relu6,
    F.leaky_relu,
    F.leaky_relu_,
    nn.AdaptiveAvgPool2d,
    nn.ConstantPad2d,
    nn.ELU,
    nn.MaxPool2d,
    nn.ReLU6,
    nn.Hardtanh,
    nn.LeakyReLU,
    torch.clamp,
    torch.flatten,
    torch.mean,
    torch.permute,
    torch.permute_copy,
    torch.squeeze,
    "clamp",
    "mean",
    "permute",
    "reshape",
    "relu",
    "relu_",
    "squeeze",
    "squeeze_",
    "leaky_relu",
)


def backend_config() -> BackendConfig:
    """What PyTorch says that ExecuTorch's XNNPACK delegate takes.

    >>> config = backend_config()
    >>> config.name, config.engine, len(config.configs)
    ('executorch', None, 84)
    """
    return (
        BackendConfig("executorch")
        .set_defaults(EXECUTORCH_DEFAULTS)
        .set_backend_pattern_configs(
            [
                *linear.single_entries([*WEIGHTED, DYNAMIC_INT8, DYNAMIC_QINT8, DYNAMIC_FLOAT16]),
                *admit(conv.conv_entries(conv.CONV[2]), WEIGHTED),
                *elementwise.binary_entries(PLAIN, elementwise.ADD_SUB_MUL),
                *shape.sharing_entries(PLAIN, SHARING),
                *admit([observed(nn.BatchNorm2d)], PLAIN),
                *shape.cat_entries(PLAIN, shape.CAT),
                *embedding.table_entries([WEIGHT_ONLY_QUINT8]),
                *embedding.functional_entries([WEIGHT_ONLY_QUINT8]),
                *embedding.bag_entries([WEIGHT_ONLY_QUINT8]),
            ]
        )
    )


get_executorch_backend_config = backend_config
