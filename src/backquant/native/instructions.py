"""The sets of instructions that the library is built for, and which of them this process may use."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backquant.native.build import NEEDED
from backquant.native.packing import Layout, Order

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


@dataclass(frozen=True)
class InstructionSet:
    """``name``: its flags are ``build.FLAGS[name]``, and what a CPU must have is ``build.NEEDED[name]``.
    ``layout``: how its kernels read weights."""

    name: str
    layout: Layout

    def is_on(self, capabilities: Mapping[str, Any]) -> bool:
        """Whether a CPU with these capabilities has them.

        >>> AVX2.is_on({"avx2": True, "fma3": True}), AVX512.is_on({"avx2": True, "fma3": True})
        (True, False)
        """
        return all(capabilities.get(name) for name in NEEDED[self.name])


AMX = InstructionSet("amx", Layout(16, tiles=True))
AVX512_VNNI = InstructionSet("avx512_vnni", Layout(16))
AVX_VNNI = InstructionSet("avx_vnni", Layout(8))
AVX512 = InstructionSet("avx512", Layout(16, Order.PAIRS))
AVX2 = InstructionSet("avx2", Layout(8, Order.PAIRS))
NEON_I8MM = InstructionSet("neon_i8mm", Layout(4))
NEON_DOT = InstructionSet("neon_dot", Layout(4, Order.SIGNED))
NEON = InstructionSet("neon", Layout(4, Order.PLACES))
_VECTORS = (AVX512_VNNI, AVX_VNNI, AVX512, AVX2)
_X86 = (AMX, *_VECTORS)

#: The fastest of a machine first.
INSTRUCTION_SETS = (*_X86, NEON_I8MM, NEON_DOT, NEON)

# Of ARM: the place in the auxiliary vector of a process, and the bit there (``asm/hwcap.h`` of Linux)
_HWCAPS = {"asimd": (16, 1), "asimddp": (16, 20), "i8mm": (26, 13)}

# What ONEDNN_MAX_CPU_ISA leaves of those of x86, by the start of its value
_WITHIN: dict[str, tuple[InstructionSet, ...]] = {
    "SSE41": (),
    "AVX2_VNNI": (AVX_VNNI, AVX2),
    "AVX2": (AVX2,),
    "AVX512_CORE_AMX": _X86,
    "AVX512_CORE_": _VECTORS,
    "AVX512_CORE": (AVX512, AVX2),
    "AVX10_1_512_AMX": _X86,
    "AVX10_2_512_AMX": _X86,
    "AVX10": _VECTORS,
    "AVX": (),
}


def usable(
    capabilities: Mapping[str, Any] | None = None, limit: str | None = None
) -> tuple[InstructionSet, ...]:
    """Those that this CPU has and that ``ONEDNN_MAX_CPU_ISA`` does not forbid, the fastest first.

    >>> [found.name for found in usable({"avx2": True, "fma3": True}, "")]
    ['avx2']
    >>> [found.name for found in usable({"asimd": True, "asimddp": True}, "")]
    ['neon_dot', 'neon']
    """
    if platform.system() != "Linux":
        return ()
    has = capabilities_here() if capabilities is None else capabilities
    said = limit_said().upper() if limit is None else limit.upper()
    within = next((sets for start, sets in _WITHIN.items() if said.startswith(start)), None)
    sets = INSTRUCTION_SETS if within is None else within
    return tuple(found for found in sets if found.is_on(has))


def capabilities_here() -> Mapping[str, Any]:
    """What this CPU has, in the words of ``build.NEEDED``, as far as the system lets it be used."""
    found = {**torch.cpu.get_capabilities(), **arm_features()}
    return found | {"amx_int8": bool(found.get("amx_int8")) and _may_use_amx()}


def _may_use_amx() -> bool:
    """Asks Linux for the tiles' registers, as oneDNN does before its first use."""
    ask = getattr(torch.cpu, "_init_amx", None)
    return ask is not None and bool(ask())


def arm_features() -> dict[str, bool]:
    """What Linux says of an ARM CPU, in the words of ``/proc/cpuinfo``; nothing elsewhere.

    >>> set(arm_features()) <= {"asimd", "asimddp", "i8mm"}
    True
    """
    if platform.machine() != "aarch64" or platform.system() != "Linux":
        return {}
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = (ctypes.c_ulong,), ctypes.c_ulong
    return {name: bool(read(place) >> bit & 1) for name, (place, bit) in _HWCAPS.items()}


def limit_said() -> str:
    """The value of ``ONEDNN_MAX_CPU_ISA``, or of its older name; empty if there is none, and on ARM, whose
    instructions it does not name."""
    if platform.machine() == "aarch64":
        return ""
    return next((os.environ[name] for name in _LIMITS if os.environ.get(name)), "")
