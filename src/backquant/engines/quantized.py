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
from backquant.engines.tables.torch_kernels import TorchKernels
from backquant.errors import EngineError
from backquant.lower.engine import Engine
from backquant.lower.engine_info import EngineInfo
from backquant.lower.machine import MachineFacts
from backquant.lower.rule import LowerRule


def rules(kernels: TorchKernels) -> list[LowerRule]:
    """All rules, in order of preference among those that fit one occurrence.

    >>> [rule.name for rule in rules(TorchKernels("fbgemm"))][:2]
    ['conv + activation', 'conv']
    """
    return [
        *quantized_weighted_rules(kernels),
        *quantized_transposed_rules(kernels),
        *common_rules(kernels),
    ]


def _info(name: str, facts: MachineFacts) -> EngineInfo:
    if name not in facts.quantized_engines:
        elsewhere = name == "fbgemm" and not facts.is_x86
        lack = "needs an x86 CPU" if elsewhere else "is not in this build of torch"
        raise EngineError(
            f"the engine {name} {lack}",
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


_QNNPACK = TorchKernels(
    "qnnpack",
    transposed="qnnpack",
    reduces_modules=False,
    reduces_functions=False,
    has_7_bits=False,
)
FBGEMM = Engine("fbgemm", partial(_info, "fbgemm"), partial(rules, TorchKernels("fbgemm")))
QNNPACK = Engine("qnnpack", partial(_info, "qnnpack"), partial(rules, _QNNPACK))
