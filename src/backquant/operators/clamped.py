"""Convolutions and linear layers followed by a clamp: one operator to kernels that saturate.

The output is observed behind the clamp, so that its bounds are those of the integers and the clamp
itself costs nothing. The clamp stays an operator of its own in the reference model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.nn.quantized import reference
from backquant.operators.conv import CONV
from backquant.operators.entry import admit, observed, swapped

CLAMPS: tuple[Any, ...] = (
    nn.ReLU6,
    nn.Hardtanh,
    F.relu6,
    F.hardtanh,
    torch.relu,  # the other spellings of ReLU are fused modules
    "relu",
    "relu_",
)


def entries(
    dtype_configs: Sequence[DTypeConfig],
    linear: Sequence[DTypeConfig] = (),
    dimensions: Sequence[int] = (1, 2, 3),
) -> list[BackendPatternConfig]:
    """Each convolution and the linear layer, as module and as function, before each clamp; ``linear``: more
    that linear layers admit. ``dimensions``: of the convolutions.

    >>> from backquant.backend_config import DTypeConfig
    >>> len(entries([DTypeConfig()]))
    56
    """
    rows = []
    for conv in (CONV[each] for each in dimensions):
        for clamp in CLAMPS:
            rows.append(swapped((conv.root, clamp), conv.root, conv.reference))
            rows += [observed((function, clamp)) for function in conv.functions]
    linears = []
    for clamp in CLAMPS:
        linears.append(swapped((nn.Linear, clamp), nn.Linear, reference.Linear))
        linears.append(observed((F.linear, clamp)))
    return [*admit(rows, dtype_configs), *admit(linears, [*dtype_configs, *linear])]
