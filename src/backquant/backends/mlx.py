"""mlx: checkpoints of language models for MLX, on Apple's machines.

Groups of 32, 64 or 128, with zero points or without; embeddings, too.
"""

from __future__ import annotations

import torch

from backquant.backend_config import BackendConfig
from backquant.backends.weights_alone import described, with_groups
from backquant.dtypes.table import INT4, UINT4
from backquant.operators import embedding, linear

GROUPS = {"group_size": [32, 64, 128]}


def backend_config() -> BackendConfig:
    """Linear layers and embeddings.

    >>> backend_config().engine is None
    True
    """
    dtypes = (INT4, UINT4, torch.int8, torch.uint8)
    return described(
        "mlx",
        [
            *linear.single_entries([with_groups(dtype, GROUPS) for dtype in dtypes]),
            *embedding.frozen_table_entries(
                [with_groups(dtype, GROUPS, bias=False) for dtype in dtypes]
            ),
        ],
    )
