"""gguf: language models for llama.cpp and what is built on it: Q8_0, Q4_0 and Q4_1.

Blocks of 32 weights with a scale of float16; larger groups are several blocks with one scale.
Embeddings, too.
"""

from __future__ import annotations

import torch

from backquant.backend_config import BackendConfig
from backquant.backends.weights_alone import described, with_groups
from backquant.dtypes.table import INT4, UINT4
from backquant.operators import embedding, linear

GROUPS = {"group_size": {"min": 32, "multiple_of": 32}}
DTYPES = (INT4, UINT4, torch.int8)


def backend_config() -> BackendConfig:
    """Linear layers and embeddings.

    >>> backend_config().engine is None
    True
    """
    half = torch.float16
    return described(
        "gguf",
        [
            *linear.single_entries([with_groups(dtype, GROUPS, half) for dtype in DTYPES]),
            *embedding.frozen_table_entries(
                [with_groups(dtype, GROUPS, half, bias=False) for dtype in DTYPES]
            ),
        ],
    )
