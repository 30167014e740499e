"""What descriptions of checkpoint formats share: weights are integers, activations float, and nothing
runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    QuantDefault,
)
from backquant.dtypes import find_dtype
from backquant.dtypes.table import INT4

BY_ROW = DTypeWithConstraints(torch.int8, symmetric=True, granularity="per_channel", ch_axis=0)
_FLOAT = QuantDefault("placeholder", dtype=torch.float)
WEIGHT = QuantDefault(
    "block_minmax",
    dtype=INT4,
    qscheme=torch.per_channel_symmetric,
    granularity="per_group(size=128)",
)


def with_groups(
    dtype: torch.dtype,
    where: dict[str, Any],
    scale_dtype: torch.dtype | None = None,
    *,
    bias: bool = True,
) -> DTypeConfig:
    """Weights in groups of these sizes along the input features, with zero points if the dtype is
    unsigned.
    """
    return _weights(dtype, "per_group", where, scale_dtype, bias=bias)


def rows(dtype: torch.dtype, scale_dtype: torch.dtype | None = None) -> DTypeConfig:
    """Weights with one scale for each output feature."""
    return _weights(dtype, "per_channel", {}, scale_dtype)


def _weights(
    dtype: torch.dtype,
    granularity: str,
    where: dict[str, Any],
    scale_dtype: torch.dtype | None,
    *,
    bias: bool = True,
) -> DTypeConfig:
    row = find_dtype(dtype)
    weight = DTypeWithConstraints(
        dtype,
        symmetric=row is None or row.low < 0,
        granularity=granularity,
        ch_axis=0 if granularity == "per_channel" else None,
        scale_dtype=scale_dtype,
    )
    last = torch.float if bias else None
    return DTypeConfig(torch.float, torch.float, weight, last, where=where or None)


def described(
    name: str,
    entries: Sequence[BackendPatternConfig],
    weight: QuantDefault = WEIGHT,
) -> BackendConfig:
    """A description without an engine, whose default is weights in groups.

    >>> described("mine", []).defaults.activation.dtype
    torch.float32
    """
    tables = DefaultOverride((nn.Embedding,), activation=_FLOAT)
    defaults = BackendDefaults(activation=_FLOAT, weight=weight, overrides=(tables,))
    config = BackendConfig(name).set_defaults(defaults)
    return config.set_backend_pattern_configs(list(entries))
