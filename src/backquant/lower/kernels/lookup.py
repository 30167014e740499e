"""Any function of one 8-bit value, as a table of its 256 results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backquant.graph.interception import dispatch_modes
from backquant.lower.kernels.boundary import looked_up
from backquant.lower.kernels.configured import KernelModule, decode_config


def tabulate(dtype: torch.dtype, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The table of ``function``, which maps all 256 integers of ``dtype`` (uint8 or int8) to integers.

    Entries are in the order of the bytes: 0 to 255, or 0 to 127 and then -128 to -1.

    >>> tabulate(torch.int8, lambda q: q.abs().to(torch.uint8))[[0, 1, 129, 255]]
    tensor([  0,   1, 127,   1], dtype=torch.uint8)
    """
    return function(torch.arange(256, dtype=torch.uint8).view(dtype))


@dataclass(frozen=True)
class LookupConfig:
    """``operator``: what the table holds, for people. ``post_op`` (``none``: there is none) with its
    numbers: the same function as a kernel before it may apply it, and ``out_scale`` and
    ``out_zero_point`` the qparams of the uint8 result."""

    operator: str
    post_op: str = "none"
    post_numbers: tuple[float, ...] = ()
    post_algorithm: str = ""
    out_scale: float = 1.0
    out_zero_point: int = 0


class Lookup(KernelModule):
    """8-bit integers of any shape and memory format to the entries of ``table`` (256 of them).

    ``config`` may be just the name of what the table holds.

    >>> table = tabulate(torch.uint8, lambda q: 255 - q)
    >>> Lookup("invert", table)(torch.tensor([0, 250], dtype=torch.uint8))
    tensor([255,   5], dtype=torch.uint8)
    """

    config_class = LookupConfig
    config: LookupConfig
    table: torch.Tensor

    def __init__(self, config: str | LookupConfig, table: torch.Tensor) -> None:
        super().__init__()
        self.config = LookupConfig(config) if isinstance(config, str) else config
        self.register_buffer("table", table.detach())
        self._bytes: bytes | None = None

    @property
    def name(self) -> str:
        return f"lookup({self.config.operator})"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The table's entry for each integer, in the memory format of ``x``."""
        found = looked_up(x, self.table)
        if found is not None:
            return found
        flat = _in_memory_order(x)
        if flat is None:
            x = x.contiguous()
            flat = x.view(-1)
        found = self._select(flat if flat.dtype == torch.uint8 else flat.view(torch.uint8))
        return found.as_strided(x.size(), x.stride())

    def _select(self, index: torch.Tensor) -> torch.Tensor:
        # With one thread bytes.translate takes a quarter of a nanosecond for a value, index_select more
        # than half of one; with more threads index_select is faster.
        # Where calls are being recorded, only operators of torch are seen.
        if torch.get_num_threads() > 1 or not index.numel() or dispatch_modes():
            return self.table.index_select(0, index.int())
        table = self._bytes
        if table is None:
            table = self._bytes = bytes(self.table.view(torch.uint8).tolist())
        found = bytearray(index.numpy()).translate(table)
        return torch.frombuffer(found, dtype=self.table.dtype)

    @classmethod
    def from_artifact(
        cls, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> Lookup:
        """Inverse of ``artifact_config()`` and the buffer ``table``."""
        return cls(decode_config(LookupConfig, config), tensors["table"])

    def _derived(self) -> dict[str, Any]:
        return {"_bytes": None}


def _in_memory_order(x: torch.Tensor) -> torch.Tensor | None:
    """The elements of ``x`` as they lie in memory; ``None`` if there are holes between them."""
    if x.is_contiguous():
        return x.view(-1)
    dims = x.dim()
    if (dims == 4 and x.is_contiguous(memory_format=torch.channels_last)) or (
        dims == 5 and x.is_contiguous(memory_format=torch.channels_last_3d)
    ):
        return x.as_strided((x.numel(),), (1,))
    return None


# Activation functions on plain integer tensors.


def clamp(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Integers clamped to ``[low, high]``; a new tensor.

    >>> clamp(torch.tensor([3, 90, 200], dtype=torch.uint8), 10, 100)
    tensor([ 10,  90, 100], dtype=torch.uint8)
    """
    return torch.clamp(x, low, high)
