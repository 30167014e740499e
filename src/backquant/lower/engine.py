"""Engines: which integer kernels this build and this CPU have, as data.

The facts of the machine are read in one place (``machine_facts``) and passed as a value, so that an
engine can be asked about a machine other than this one.

Sources: the ``isa`` names are those of ``torch.cpu.get_capabilities()`` and of oneDNN's
``ONEDNN_MAX_CPU_ISA`` variable (oneDNN developer guide, "CPU dispatcher control"); that 8-bit
products may saturate in 16 bits without VNNI: oneDNN developer guide, "Nuances of int8 computations".
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from backquant.dtypes import dtype_name
from backquant.errors import ArtifactError, EngineError, did_you_mean

__all__ = ["ENGINES", "EngineInfo", "MachineFacts", "engine_here", "engine_info", "machine_facts"]

ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")

_X86 = ("x86_64", "amd64", "i386", "i686")
_ONEDNN_KERNELS = (
    "onednn.qconv_pointwise",
    "onednn.qconv2d_pointwise",
    "onednn.qlinear_pointwise",
)
_WIDE_512 = ("avx512_vnni", "amx_int8", "avx10_1", "avx10_2")
_WIDE = ("avx512_vnni", "avx_vnni", "amx_int8", "avx_vnni_int8", "avx10_1", "avx10_2")
# What ONEDNN_MAX_CPU_ISA leaves of them, by the start of its value: limits are of one line of instruction
# sets, so that AVX2_VNNI is no VNNI at all on a CPU that has that of AVX-512 only.
_WITHIN_LIMIT: dict[str, tuple[str, ...]] = {
    "SSE41": (),
    "AVX2_VNNI": ("avx_vnni", "avx_vnni_int8"),
    "AVX512_CORE_": _WIDE_512,
    "AVX10": _WIDE_512,
    "AVX": (),  # AVX, AVX2, AVX512_CORE
}


@dataclass(frozen=True)
class MachineFacts:
    """What decides which kernels can run: the build of torch, and the CPU."""

    architecture: str
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    onednn: bool = False
    quantized_engines: tuple[str, ...] = ()
    torch_version: str = ""
    isa_limit: str = ""  # ONEDNN_MAX_CPU_ISA; empty: none

    @property
    def is_x86(self) -> bool:
        return self.architecture.lower() in _X86

    @property
    def vnni(self) -> bool:
        """Whether oneDNN adds 8-bit products up in 32 bits by one instruction."""
        return any(bool(self.capabilities.get(name)) for name in self._within_limit)

    @property
    def _within_limit(self) -> tuple[str, ...]:
        limit = self.isa_limit.upper()
        return next((n for start, n in _WITHIN_LIMIT.items() if limit.startswith(start)), _WIDE)

    @property
    def has_vnni(self) -> bool:
        """Whether the CPU has such an instruction, whatever oneDNN may use."""
        return any(bool(self.capabilities.get(name)) for name in _WIDE)


@dataclass(frozen=True)
class EngineInfo:
    """One engine on one machine.

    ``wide_accumulation``: products of 8-bit activations and 8-bit weights are summed without
    saturation. Without it the range of activation times weight is limited (``max_product``).
    ``wide_depthwise``: the same for depthwise convolutions.

    >>> info = EngineInfo("x86", "avx512_vnni", "2.13.0", ("onednn.qconv_pointwise",),
    ...                   (torch.uint8,), (torch.int8,), wide_accumulation=True)
    >>> info.describe()
    'x86 (avx512_vnni, torch 2.13.0)'
    """

    name: str
    isa: str
    torch_version: str
    kernels: tuple[str, ...]
    activation_dtypes: tuple[torch.dtype, ...]
    weight_dtypes: tuple[torch.dtype, ...]
    wide_accumulation: bool = True
    wide_depthwise: bool = True

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Whether activations may be integers of ``dtype``; int8 runs as uint8, 128 further up.

        >>> info = EngineInfo("fbgemm", "avx2", "2.13.0", (), (torch.uint8,), (torch.int8,))
        >>> info.computes_in(torch.int8), info.computes_in(torch.int16)
        (True, False)
        """
        return dtype in self.activation_dtypes or (
            dtype == torch.int8 and torch.uint8 in self.activation_dtypes
        )

    def max_product(self, depthwise: bool = False) -> int | None:
        """Largest |activation × weight| of which two add up within 16 bits; ``None``: no limit.

        >>> info = EngineInfo("fbgemm", "avx2", "2.13.0", (), (), (), wide_depthwise=False)
        >>> info.max_product(), info.max_product(depthwise=True)
        (None, 16383)
        """
        wide = self.wide_accumulation and (self.wide_depthwise or not depthwise)
        return None if wide else (2**15 - 1) // 2

    def describe(self) -> str:
        """Name, instruction set and version in one line."""
        return f"{self.name} ({self.isa}, torch {self.torch_version})"

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data; ``from_dict`` reads it back.

        >>> info = engine_info("x86")
        >>> EngineInfo.from_dict(info.to_dict()) == info
        True
        """
        data = asdict(self)
        for key in ("activation_dtypes", "weight_dtypes"):
            data[key] = [dtype_name(dtype) for dtype in data[key]]
        data["kernels"] = list(self.kernels)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineInfo:
        """Inverse of ``to_dict``."""
        values = dict(data)
        for key in ("activation_dtypes", "weight_dtypes"):
            values[key] = tuple(getattr(torch, name) for name in values[key])
        values["kernels"] = tuple(values["kernels"])
        return cls(**values)


def machine_facts() -> MachineFacts:
    """The facts of this build and this CPU.

    >>> machine_facts().torch_version == torch.__version__.split("+")[0]
    True
    """
    return MachineFacts(
        architecture=platform.machine(),
        capabilities=torch.cpu.get_capabilities(),
        onednn=torch.backends.mkldnn.is_available() and _has_kernel(_ONEDNN_KERNELS[0]),
        quantized_engines=tuple(e for e in torch.backends.quantized.supported_engines),
        torch_version=torch.__version__.split("+")[0],
        isa_limit=os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")),
    )


def _has_kernel(name: str) -> bool:
    full = name.replace(".", "::")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, "MkldnnCPU"))


def engine_info(name: str, facts: MachineFacts | None = None) -> EngineInfo:
    """The engine ``name`` on the machine that ``facts`` describe (default: this one).

    Raises ``EngineError`` for a name that is no engine, and for an engine that this build of torch
    or this CPU lacks; the message says which engine can be used instead.

    >>> engine_info("x86").activation_dtypes
    (torch.uint8,)
    >>> engine_info("onednn", MachineFacts("aarch64"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    backquant.errors.EngineError: the engine onednn needs oneDNN's quantized kernels...
    ...
    """
    if name not in ENGINES:
        meant = did_you_mean(name, ENGINES)
        raise EngineError(
            f"there is no engine {name!r}" + (f" ({meant})" if meant else ""),
            where=f"engine: {name}",
            fix=f"choose one of {', '.join(ENGINES)}, or no engine: the reference model runs anywhere",
        )
    facts = machine_facts() if facts is None else facts
    if name in ("x86", "onednn"):
        return _onednn_engine(name, facts)
    return _quantized_engine(name, facts)


def engine_here(made_for: EngineInfo, facts: MachineFacts | None = None) -> EngineInfo:
    """The engine of this machine that runs a model made for ``made_for``.

    Raises ``ArtifactError`` where its sums may saturate and those it was made for do not, and
    ``EngineError`` where this build or CPU has no such engine.

    >>> engine_here(engine_info("qnnpack")).name
    'qnnpack'
    """
    here = engine_info(made_for.name, facts)
    if made_for.wide_accumulation and not here.wide_accumulation:
        raise ArtifactError(
            f"the model was made for {made_for.describe()}, where 8-bit products are summed in 32 "
            f"bits; on {here.describe()} they would saturate silently",
            where="engine",
            fix="quantize again on this machine",
        )
    return here


def _isa(facts: MachineFacts) -> str:
    """The best instruction set for 8-bit products, as one word."""
    if not facts.is_x86:
        return facts.architecture
    names = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512_bw", "avx2")
    limit = facts.isa_limit.lower()
    if limit in ("sse41", "avx", "avx2", "avx512_core"):
        return limit
    if facts.has_vnni and not facts.vnni:
        return "avx2"
    return next((name for name in names if facts.capabilities.get(name)), facts.architecture)


def _onednn_engine(name: str, facts: MachineFacts) -> EngineInfo:
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
            fix=_alternative(facts, name),
        )
    return EngineInfo(
        name=name,
        isa=_isa(facts),
        torch_version=facts.torch_version,
        kernels=(*_ONEDNN_KERNELS, *_transposed(facts, "fbgemm"), *_dynamic(facts, name)),
        activation_dtypes=(torch.uint8,),
        weight_dtypes=(torch.int8,),
        wide_accumulation=facts.vnni or not facts.is_x86,
    )


def _quantized_engine(name: str, facts: MachineFacts) -> EngineInfo:
    if name not in facts.quantized_engines:
        raise EngineError(
            f"the engine {name} is not in this build of torch",
            where=f"quantized engines: {', '.join(facts.quantized_engines) or 'none'}",
            fix=_alternative(facts, name),
        )
    return EngineInfo(
        name=name,
        isa=_isa(facts),
        torch_version=facts.torch_version,
        kernels=(
            "quantized.conv",
            "quantized.linear",
            *_transposed(facts, name),
            *_dynamic(facts, name),
        ),
        activation_dtypes=(torch.uint8,),
        weight_dtypes=(torch.int8,),
        # qnnpack's kernels widen before they multiply.
        wide_accumulation=name == "qnnpack" or not facts.is_x86 or facts.has_vnni,
        # fbgemm's depthwise kernels sum pairs in 16 bits on any CPU (measured on torch 2.13).
        wide_depthwise=name == "qnnpack",
    )


def _transposed(facts: MachineFacts, engine: str) -> tuple[str, ...]:
    """Transposed convolutions are taken from a quantized engine of torch, which a build may lack."""
    return (f"quantized.conv_transpose({engine})",) * (engine in facts.quantized_engines)


def _dynamic(facts: MachineFacts, engine: str) -> tuple[str, ...]:
    """Dynamic linear layers run on packed weights of the engine of the same name; float16 ones on
    those of fbgemm, which x86 uses, too."""
    if engine not in facts.quantized_engines:
        return ()
    plain = f"quantized.linear_dynamic({engine})"
    half = f"quantized.linear_dynamic_fp16({engine})"
    return (plain, half) if engine in ("fbgemm", "x86") else (plain,)


def _alternative(facts: MachineFacts, wanted: str) -> str:
    have = [e for e in ENGINES if e in facts.quantized_engines and e != wanted]
    if facts.onednn and not facts.is_x86 and wanted == "x86":
        have.insert(0, "onednn")
    if have:
        return f'backquant.quantize(..., backend="{have[0]}")'
    return "install a build of torch with oneDNN (pip install torch), or keep the reference model"
