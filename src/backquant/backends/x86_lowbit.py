"""x86_lowbit: weights of 4 and 8 bits on PyTorch's CPU kernels; activations are bfloat16, without data.

1. ``aten._weight_int4pack_mm_for_cpu``: groups of 32, 64, 128 or 256 along the input features, which the
   group divides. It takes float32 activations, too, a hundred times slower; in bfloat16 it is faster than the
   float32 layer.
2. ``aten._weight_int8pack_mm``: 8-bit weights with one scale for each output feature.
3. Embeddings hold groups of 4 bits; only the rows that are read become floats.

Activations that are cast are said so: the input is bfloat16 at each call.
"""

from __future__ import annotations

import torch
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    QuantDefault,
    Tolerance,
)
from backquant.dtypes.table import INT4
from backquant.operators import embedding, linear

# bfloat16 has 8 bits: half a step each of the product, more where groups or the bias cancel it
SCALES_AND_RESULTS = Tolerance(
    8, "scales and products are rounded to bfloat16, before the bias is added"
)

GROUPS = DTypeWithConstraints(INT4, symmetric=True, granularity="per_group")
GROUPED = DTypeConfig(
    torch.bfloat16,
    torch.float,
    GROUPS,
    torch.float,
    is_dynamic=True,
    tolerance=SCALES_AND_RESULTS,
    where={"group_size": [32, 64, 128, 256]},
)
BY_ROW = DTypeConfig(
    torch.bfloat16,
    torch.float,
    DTypeWithConstraints(torch.int8, symmetric=True, granularity="per_channel", ch_axis=0),
    torch.float,
    is_dynamic=True,
    tolerance=SCALES_AND_RESULTS,
)
TABLE = DTypeConfig(torch.float, torch.float, GROUPS)
TABLE_INT8 = DTypeConfig(
    torch.float,
    torch.float,
    DTypeWithConstraints(torch.int8, symmetric=True, granularity="per_channel", ch_axis=0),
)


DEFAULTS = BackendDefaults(
    activation=QuantDefault("placeholder", dtype=torch.bfloat16, is_dynamic=True),
    weight=QuantDefault(
        "block_minmax",
        dtype=INT4,
        qscheme=torch.per_channel_symmetric,
        granularity="per_group(size=128)",
    ),
    overrides=(
        DefaultOverride((nn.Embedding,), activation=QuantDefault("placeholder", dtype=torch.float)),
    ),
)


def backend_config() -> BackendConfig:
    """Linear layers and embeddings with weights of few bits.

    >>> config = backend_config()
    >>> config.name, config.engine
    ('x86_lowbit', 'x86')
    """
    return (
        BackendConfig("x86_lowbit")
        .set_engine("x86")
        .set_defaults(DEFAULTS)
        .set_backend_pattern_configs(
            [
                *linear.single_entries([GROUPED, BY_ROW]),
                *embedding.frozen_table_entries([TABLE, TABLE_INT8]),
            ]
        )
    )
