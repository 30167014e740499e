"""What this package's engines share: which kernels of torch's quantized engines a build has."""

from __future__ import annotations

from backquant.lower.machine import MachineFacts

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
