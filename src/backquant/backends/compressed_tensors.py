"""compressed_tensors: checkpoints of language models as llm-compressor writes them; vLLM, SGLang and
transformers
load them.

Groups are those that vLLM's kernels have. Activations are float (``pack-quantized``), or quantized at
each call
for each token, or ahead with one scale for the tensor: int8 (``int-quantized``) or float8 E4M3
(``float-quantized``). MXFP4, MXFP8 and NVFP4 are blocks of 32, 32 and 16 floats, whose scales are floats of 8
bits.
"""

from __future__ import annotations

import torch

from backquant.backend_config import BackendConfig, DTypeConfig, DTypeWithConstraints
from backquant.backends.weights_alone import BY_ROW, described, rows, with_groups
from backquant.dtypes.table import E2M1, INT4, UINT4
from backquant.operators import linear

GROUPS = {"group_size": [32, 64, 128]}
TOKENS = DTypeWithConstraints(torch.int8, granularity="per_token")
TENSOR = DTypeWithConstraints(torch.int8, symmetric=True)
FLOAT8_TOKENS = DTypeWithConstraints(torch.float8_e4m3fn, granularity="per_token")
FLOAT8 = DTypeWithConstraints(torch.float8_e4m3fn, symmetric=True)
FLOAT8_ROWS = DTypeWithConstraints(
    torch.float8_e4m3fn, symmetric=True, granularity="per_channel", ch_axis=0
)
FLOAT8_ALONE = DTypeConfig(torch.float, torch.float, FLOAT8_ROWS, torch.float)
ACTIVATIONS = [
    DTypeConfig(TOKENS, torch.float, BY_ROW, torch.float, is_dynamic=True),
    DTypeConfig(TENSOR, torch.float, BY_ROW, torch.float),
    DTypeConfig(FLOAT8_TOKENS, torch.float, FLOAT8_ROWS, torch.float, is_dynamic=True),
    DTypeConfig(FLOAT8, torch.float, FLOAT8_ROWS, torch.float),
]


def backend_config() -> BackendConfig:
    """Linear layers.

    >>> backend_config().engine is None
    True
    """
    weights = [
        with_groups(INT4, GROUPS),
        rows(INT4),
        with_groups(UINT4, GROUPS),
        rows(UINT4),
        rows(torch.int8),
        with_groups(torch.int8, GROUPS),
        FLOAT8_ALONE,
        with_groups(E2M1, {"group_size": [32]}, torch.float8_e8m0fnu),
        with_groups(torch.float8_e4m3fn, {"group_size": [32]}, torch.float8_e8m0fnu),
        with_groups(E2M1, {"group_size": [16]}, torch.float8_e4m3fn),
    ]
    return described("compressed_tensors", linear.single_entries([*weights, *ACTIVATIONS]))
