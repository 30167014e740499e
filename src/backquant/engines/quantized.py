"""The engines ``fbgemm`` and ``qnnpack``: torch's ``quantized::`` kernels."""

from __future__ import annotations

from functools import partial

import torch

from backquant.engines.builds import alternative, dynamic_kernels, transposed_kernels
from backquant.engines.tables.common import common_rules
from backquant.engines.tables.quantized_weighted import (
    quantized_transposed_rules,
    quantized_weighted_rules,
)
from backquant.errors import EngineError
from backquant.lower.engine import Engine, EngineInfo
from backquant.lower.machine import MachineFacts
from backquant.lower.rule import LowerRule

__all__ = ["FBGEMM", "QNNPACK", "rules"]


def rules() -> list[LowerRule]:
    """All rules, in order of preference among those that fit one occurrence.

    >>> [rule.name for rule in rules()][:2]
    ['conv + activation', 'conv']
    """
    return [*quantized_weighted_rules(), *quantized_transposed_rules(), *common_rules()]


def _info(name: str, facts: MachineFacts) -> EngineInfo:
    if name not in facts.quantized_engines:
        raise EngineError(
            f"the engine {name} is not in this build of torch",
            where=f"quantized engines: {', '.join(facts.quantized_engines) or 'none'}",
            fix=alternative(facts, name),
        )
    return EngineInfo(
        name=name,
        isa=facts.isa,
        torch_version=facts.torch_version,
        kernels=(
            "quantized.conv",
            "quantized.linear",
            *transposed_kernels(facts, name),
            *dynamic_kernels(facts, name),
        ),
        activation_dtypes=(torch.uint8,),
        weight_dtypes=(torch.int8,),
        # qnnpack's kernels widen before they multiply.
        wide_accumulation=name == "qnnpack" or not facts.is_x86 or facts.has_vnni,
        # fbgemm's depthwise kernels sum pairs in 16 bits on any CPU (measured on torch 2.13).
        wide_depthwise=name == "qnnpack",
    )


FBGEMM = Engine("fbgemm", partial(_info, "fbgemm"), rules)
QNNPACK = Engine("qnnpack", partial(_info, "qnnpack"), rules)
