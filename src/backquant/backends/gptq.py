"""gptq: checkpoints of language models as GPTQModel writes them; vLLM, SGLang and transformers load them.

Scales are float16. Words of 32 bits hold whole numbers of weights along both axes. All layers have one dtype
and one size of groups.
"""

from __future__ import annotations

import torch

from backquant.backend_config import BackendConfig
from backquant.backends.weights_alone import described, with_groups
from backquant.dtypes.table import INT4, UINT4
from backquant.operators import linear

HALF = torch.float16
GROUPS = {
    "group_size": [32, 64, 128],
    "in_channels": {"multiple_of": 8},
    "out_channels": {"multiple_of": 8},
}


def backend_config() -> BackendConfig:
    """Linear layers.

    >>> backend_config().engine is None
    True
    """
    dtypes = (INT4, UINT4, torch.int8)
    entries = linear.single_entries([with_groups(dtype, GROUPS, HALF) for dtype in dtypes])
    return described("gptq", entries)
