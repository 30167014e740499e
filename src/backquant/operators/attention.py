"""Attention as one operator: two matrix products around a softmax.

It stays one operator in a graph. Where it is spelled as ``matmul``, ``softmax`` and ``matmul`` (eager
attention), those are operators of their own: see ``elementwise`` and ``fixed_qparams``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.operators.entry import admit, observed
from backquant.operators.operator import INPUT, Operator, Sample


def entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``F.scaled_dot_product_attention`` of three activations.

    >>> [e.pattern.__name__ for e in entries([DTypeConfig()])]
    ['scaled_dot_product_attention']
    """
    return admit([observed(F.scaled_dot_product_attention)], dtype_configs)


_HEADS = ((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))

OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="scaled_dot_product_attention",
        family="attention",
        sample=Sample(_HEADS, call=(INPUT, INPUT, INPUT)),
        functions=(F.scaled_dot_product_attention,),
        aten=(torch.ops.aten.scaled_dot_product_attention.default,),
    ),
)
