"""What an engine is on one machine: its kernels, and what they compute in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from backquant.dtypes import dtype_name


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
