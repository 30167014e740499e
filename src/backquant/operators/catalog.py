"""Single operators in the order in which PyTorch's own backends list them.

A backend's entries keep one order, families do not: these two lists run through several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.operators import activation, norm
from backquant.operators.entry import admit, observed
from backquant.operators.shape import sharing_entries

SHARING: tuple[Any, ...] = (
    # modules
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.Hardtanh,
    nn.Identity,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ReLU,
    nn.ReLU6,
    # functions
    F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
    F.hardtanh,
    F.hardtanh_,
    F.interpolate,
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    F.pixel_shuffle,
    F.pixel_unshuffle,
    F.relu,
    F.relu6,
    F.avg_pool1d,
    F.avg_pool2d,
    F.avg_pool3d,
    torch.clamp,
    torch.flatten,
    torch.mean,
    torch.narrow,
    torch.repeat_interleave,
    torch.transpose,
    torch.squeeze,
    torch.stack,
    torch.unsqueeze,
    # methods
    "contiguous",
    "clamp",
    "detach",
    "detach_",
    "mean",
    "permute",
    "repeat",
    "repeat_interleave",
    "reshape",
    "relu",
    "relu_",
    "squeeze",
    "squeeze_",
    "transpose",
    "unsqueeze",
    "unsqueeze_",
    "view",
)

_OBSERVED: tuple[Any, ...] = (
    *activation.MODULES,
    *norm.INSTANCE_NORMS,
    nn.Dropout,
    activation.PRELU,
    *activation.FUNCTIONS,
    F.dropout,
)


def sharing_qparams_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """Pooling, reshaping and clipping: operators whose output keeps the input's qparams.

    >>> len(sharing_qparams_entries([DTypeConfig(torch.quint8, torch.quint8)])) == len(SHARING)
    True
    """
    return sharing_entries(dtype_configs, SHARING)


def observed_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """Activations, norms and dropout whose output is observed, then the functions of norms.

    >>> [e.pattern.__name__ for e in observed_entries([DTypeConfig()])][-3:]
    ['dropout', 'group_norm', 'instance_norm']
    """
    return [
        *admit(map(observed, _OBSERVED), dtype_configs),
        *norm.functional_entries(dtype_configs),
    ]
