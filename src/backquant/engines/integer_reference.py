"""The engine ``integer_reference``: integers between operators, computed as the description says.

Runs wherever torch does, and gives the same bits there. It is what a chip's simulator is compared with;
nothing of it is made to be fast.
"""

from __future__ import annotations

import torch

from backquant.engines.tables.integer.lookup_tables import binary_rules, join_rules, table_rules
from backquant.engines.tables.integer.reduced import (
    embedding_rules,
    norm_rules,
    pooling_rules,
    resize_rules,
    softmax_rules,
)
from backquant.engines.tables.integer.weighted import at_each_call_rules, weighted_rules
from backquant.engines.tables.passthrough import passthrough_rules
from backquant.lower.engine import Engine
from backquant.lower.machine import EngineInfo, MachineFacts
from backquant.lower.rule import LowerRule

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16)


def _info(facts: MachineFacts) -> EngineInfo:
    return EngineInfo(
        name="integer_reference",
        isa="any machine",
        torch_version=facts.torch_version,
        kernels=(),
        activation_dtypes=_INTEGERS,
        weight_dtypes=_INTEGERS,
        as_described=True,
    )


def _rules() -> list[LowerRule]:
    return [
        *at_each_call_rules(),
        *weighted_rules(),
        *binary_rules(),
        *join_rules(),
        *pooling_rules(),
        *softmax_rules(),
        *norm_rules(),
        *resize_rules(),
        *embedding_rules(),
        *passthrough_rules(),
        *table_rules(),
    ]


INTEGER_REFERENCE = Engine("integer_reference", _info, _rules)
