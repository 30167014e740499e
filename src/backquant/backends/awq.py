"""awq: checkpoints of language models as AutoAWQ writes them; vLLM, SGLang and transformers load them.

4 bits with zero points, scales of float16. All layers have one size of groups.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backquant.backend_config import BackendConfig
from backquant.backends.weights_alone import WEIGHT, described, with_groups
from backquant.dtypes.table import UINT4
from backquant.operators import linear

GROUPS = {"group_size": [32, 64, 128], "out_channels": {"multiple_of": 8}}
AFFINE = replace(WEIGHT, dtype=UINT4, qscheme=torch.per_channel_affine)


def backend_config() -> BackendConfig:
    """Linear layers.

    >>> backend_config().engine is None
    True
    """
    entries = linear.single_entries([with_groups(UINT4, GROUPS, torch.float16)])
    return described("awq", entries, AFFINE)
