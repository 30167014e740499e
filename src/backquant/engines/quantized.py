"""The engines ``fbgemm`` and ``qnnpack``: torch's ``quantized::`` kernels."""

from __future__ import annotations

from functools import partial

import torch

from backquant.engines.tables.common import common_rules
from backquant.engines.tables.quantized_weighted import (
    TorchKernels,
    quantized_transposed_rules,
    quantized_weighted_rules,
)
from backquant.errors import EngineError
from backquant.lower.engine import Engine
from backquant.lower.machine import EngineInfo, MachineFacts
from backquant.lower.rule import LowerRule

# What this package's engines share: which kernels of torch's quantized engines a build has.

_OURS = ("x86", "onednn", "fbgemm", "qnnpack")


def transposed_kernels(facts: MachineFacts, engine: str) -> tuple[str, ...]:
    """Transposed convolutions are taken from a quantized engine of torch, which a build may lack."""
    return (f"quantized.conv_transpose({engine})",) * (engine in facts.quantized_engines)


def dynamic_kernels(facts: MachineFacts, engine: str) -> tuple[str, ...]:
    """Dynamic linear layers run on packed weights of the engine of the same name; float16 ones on
    those of fbgemm, which x86 uses, too."""
    if engine not in facts.quantized_engines:
        return ()
    plain = f"quantized.linear_dynamic({engine})"
    half = f"quantized.linear_dynamic_fp16({engine})"
    return (plain, half) if engine in ("fbgemm", "x86") else (plain,)


def alternative(facts: MachineFacts, wanted: str) -> str:
    """Which of our engines can be used in place of ``wanted``: the fix of an error."""
    have = [e for e in _OURS if e in facts.quantized_engines and e != wanted]
    if facts.onednn and not facts.is_x86 and wanted == "x86":
        have.insert(0, "onednn")
    if have:
        return f'backquant.quantize(..., backend="{have[0]}")'
    return "install a build of torch with oneDNN (pip install torch), or keep the reference model"


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
