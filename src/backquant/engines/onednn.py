"""The engines ``x86`` and ``onednn``: oneDNN kernels on plain integer tensors."""

from __future__ import annotations

from functools import partial

import torch

from backquant.engines.quantized import alternative, dynamic_kernels, transposed_kernels
from backquant.engines.tables.common import common_rules
from backquant.engines.tables.dynamic import grouped_rules, lowbit_rules
from backquant.engines.tables.onednn_weighted import conv_add_rules, onednn_weighted_rules
from backquant.engines.tables.quantized_weighted import TorchKernels, quantized_transposed_rules
from backquant.errors import EngineError
from backquant.lower.engine import Engine
from backquant.lower.machine import EngineInfo, MachineFacts
from backquant.lower.rule import LowerRule

_KERNELS = (
    "onednn.qconv_pointwise",
    "onednn.qconv2d_pointwise",
    "onednn.qlinear_pointwise",
)


def rules(kernels: TorchKernels) -> list[LowerRule]:
    """All rules, in order of preference among those that fit one occurrence.

    >>> [rule.name for rule in rules(TorchKernels("x86"))][:3]
    ['weight-only linear', 'weight-only functional linear', 'weight-only embedding']
    """
    return [
        *lowbit_rules(),
        *conv_add_rules(),
        *onednn_weighted_rules(),
        *grouped_rules(kernels),
        *quantized_transposed_rules(kernels),
        *common_rules(kernels),
    ]


def _info(name: str, facts: MachineFacts) -> EngineInfo:
    if not facts.onednn or (name == "x86" and not facts.is_x86):
        lack = (
            "needs an x86 CPU"
            if facts.onednn
            else "needs oneDNN's quantized kernels, which this build of torch has not"
        )
        raise EngineError(
            f"the engine {name} {lack}",
            where=f"{facts.architecture}, torch {facts.torch_version or 'unknown'}, "
            f"quantized engines: {', '.join(facts.quantized_engines) or 'none'}",
            fix=alternative(facts, name),
        )
    return EngineInfo(
        name=name,
        isa=facts.isa,
        torch_version=facts.torch_version,
        kernels=(*_KERNELS, *transposed_kernels(facts, "fbgemm"), *dynamic_kernels(facts, name)),
        activation_dtypes=(torch.uint8,),
        weight_dtypes=(torch.int8,),
        wide_accumulation=facts.vnni or not facts.is_x86,
    )


_ONEDNN = TorchKernels("onednn", reduces_functions=False, affine_weights=False)
X86 = Engine("x86", partial(_info, "x86"), partial(rules, TorchKernels("x86")))
ONEDNN = Engine("onednn", partial(_info, "onednn"), partial(rules, _ONEDNN))
