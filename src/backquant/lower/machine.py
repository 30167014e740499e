"""What decides which kernels can run: the build of torch, and the CPU, read in one place.

Sources: the ``isa`` names are those of ``torch.cpu.get_capabilities()`` and of oneDNN's
``ONEDNN_MAX_CPU_ISA`` variable (oneDNN developer guide, "CPU dispatcher control").
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from backquant.graph import get_module
from backquant.json_text import from_plain_data, plain_data
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.qdq import is_dequantize, is_quantize
from backquant.native.instructions import limit_said

_X86 = ("x86_64", "amd64", "i386", "i686")
_ON_X86 = ("fbgemm", "x86")
_WIDE_512 = ("avx512_vnni", "amx_int8", "avx10_1", "avx10_2")
_WIDE = ("avx512_vnni", "avx_vnni", "amx_int8", "avx_vnni_int8", "avx10_1", "avx10_2")

# The instruction sets above that each value of ONEDNN_MAX_CPU_ISA admits, by prefix of the value. AVX2 and
# AVX-512 have a VNNI each: AVX2_VNNI admits none on a CPU that has only that of AVX-512.
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
    isa_limit: str = ""  # the value of ONEDNN_MAX_CPU_ISA; empty: not set

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
    def isa(self) -> str:
        """The best instruction set for 8-bit products, as one word."""
        if not self.is_x86:
            return self.architecture
        names = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512_bw", "avx2")
        limit = self.isa_limit.lower()
        if limit in ("sse41", "avx", "avx2", "avx512_core"):
            return limit
        if self.has_vnni and not self.vnni:
            return "avx2"
        return next((name for name in names if self.capabilities.get(name)), self.architecture)

    @property
    def has_vnni(self) -> bool:
        """Whether the CPU has such an instruction, whatever oneDNN may use."""
        return any(bool(self.capabilities.get(name)) for name in _WIDE)


def quantized_engines() -> tuple[str, ...]:
    """torch's quantized engines that run on this CPU.

    Builds for ARM name fbgemm and x86 among them, whose kernels are x86's: a layer packed for one of them
    raises "unknown architecure" (torch 2.13; issue 177254 of pytorch/pytorch).
    """
    named = tuple(torch.backends.quantized.supported_engines)
    if platform.machine().lower() in _X86:
        return named
    return tuple(engine for engine in named if engine not in _ON_X86)


def machine_facts() -> MachineFacts:
    """The facts of this build and this CPU.

    >>> machine_facts().torch_version == torch.__version__.split("+")[0]
    True
    """
    return MachineFacts(
        architecture=platform.machine(),
        capabilities=torch.cpu.get_capabilities(),
        onednn=torch.backends.mkldnn.is_available() and _has_kernel("onednn.qconv_pointwise"),
        quantized_engines=quantized_engines(),
        torch_version=torch.__version__.split("+")[0],
        isa_limit=limit_said(),
    )


def _has_kernel(name: str) -> bool:
    full = name.replace(".", "::")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, "MkldnnCPU"))


# Which values a kernel may overwrite: those that nothing reads afterwards.
def may_overwrite(
    graph_module: GraphModule, value: Node, reading: Node, replaced: Node | None = None
) -> bool:
    """Whether nothing reads the memory of the integers ``value`` after the node ``reading``, but for
    ``replaced``, which ``reading`` takes the place of.

    ``value`` must be made by a kernel, in memory of its own, and so must be what its other readers
    make. Readers may stand behind dequantize nodes.

    >>> import torch
    >>> traced = torch.fx.symbolic_trace(torch.nn.Identity())
    >>> x, out = traced.graph.nodes
    >>> may_overwrite(traced, x, out)  # it is the caller's own tensor
    False
    """
    if not makes_memory(graph_module, value):
        return False
    for user in value.users:
        if user is reading or user is replaced:
            continue
        if is_dequantize(user):
            if any(reader is not reading for reader in user.users):
                return False
        elif not (user < reading and makes_memory(graph_module, user)):
            return False
    return True


def makes_memory(graph_module: GraphModule, node: Node) -> bool:
    """Whether ``node`` returns integers in newly allocated memory."""
    if is_quantize(node):
        return True
    if node.op == "call_module":
        return isinstance(get_module(graph_module, str(node.target)), KernelModule)
    home = getattr(node.target, "__module__", "") or ""
    return node.op == "call_function" and home.startswith("backquant.lower.kernels.")


# What an engine is on one machine: its kernels, and what they compute in.


@dataclass(frozen=True)
class EngineInfo:
    """One engine on one machine.

    ``wide_accumulation``: products of 8-bit activations and 8-bit weights are summed without
    saturation. Without it the range of activation times weight is limited (``max_product``).
    ``wide_depthwise``: the same for depthwise convolutions.
    ``as_described``: kernels round and requantize as the description names it, and are there to be compared
    with, not to be fast: nothing is timed, boundaries stay the reference model's operators.

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
    as_described: bool = False

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

        >>> from backquant.lower import engine_info
        >>> info = engine_info("x86")
        >>> EngineInfo.from_dict(info.to_dict()) == info
        True
        """
        data: dict[str, Any] = plain_data(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineInfo:
        """Inverse of ``to_dict``."""
        made: EngineInfo = from_plain_data(cls, data)
        return made
