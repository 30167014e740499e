"""torchao: checkpoints of language models that transformers loads with ``TorchAoConfig``.

Weights of 4 bits in groups of 32, 64, 128 or 256, symmetric or with zero points; int8 and float8 E4M3 by row.
Activations are float, or int8 at each call for each token.
"""

from __future__ import annotations

import torch

from backquant.backend_config import BackendConfig, DTypeConfig, DTypeWithConstraints
from backquant.backends.weights_alone import BY_ROW, described, rows, with_groups
from backquant.dtypes.table import INT4, UINT4
from backquant.operators import linear

GROUPS = {"group_size": [32, 64, 128, 256]}
TOKENS = DTypeWithConstraints(torch.int8, granularity="per_token")
FLOAT8_ROWS = DTypeWithConstraints(
    torch.float8_e4m3fn, symmetric=True, granularity="per_channel", ch_axis=0
)
GROUPS_OF_4 = DTypeWithConstraints(INT4, symmetric=True, granularity="per_group")


def backend_config() -> BackendConfig:
    """Linear layers.

    >>> backend_config().engine is None
    True
    """
    weights = [
        with_groups(INT4, GROUPS),
        with_groups(UINT4, GROUPS),
        with_groups(torch.int8, GROUPS),
        rows(torch.int8),
        DTypeConfig(torch.float, torch.float, FLOAT8_ROWS, torch.float),
        DTypeConfig(TOKENS, torch.float, BY_ROW, torch.float, is_dynamic=True),
        DTypeConfig(TOKENS, torch.float, GROUPS_OF_4, torch.float, is_dynamic=True, where=GROUPS),
    ]
    return described("torchao", linear.single_entries(weights))
