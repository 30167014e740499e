"""Kernels with any number of buffers and a packed object that is built from them.

Invariants

1. What is stored (``state_dict``, pickle, deepcopy, artifact) are the buffers and a JSON-able
   configuration; never the packed object.
2. The packed object is built at the first call, and again after a copy, a load or a move. Buffers that are
   written in place are not noticed: use ``load_state_dict``.
3. Buffers keep their dtypes: ``.half()`` and the like only move them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from typing_extensions import Self

from backquant.errors import InputError
from backquant.lower.kernels.configured import KernelModule, decode_config, lacking
from backquant.lower.kernels.engine_setting import packing_for
from backquant.lower.kernels.views import quantized_weight

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def pack_linear(
    engine: str,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    bias: torch.Tensor | None,
) -> Any:
    """The packed weight of a linear layer for one of torch's quantized engines.

    ``weight`` is int8 ``[out, in]`` with one scale and zero point or one per row, or float16, of
    which the qparams are ignored. ``bias`` is float32 ``[out]``.

    >>> one = torch.ones(1, 2, dtype=torch.float16)
    >>> packed = pack_linear("fbgemm", one, torch.ones(1), torch.zeros(1), None)
    >>> torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 2), packed)
    tensor([[2.]])
    """
    ops = torch.ops.quantized
    if weight.is_floating_point():
        with packing_for(engine):
            return ops.linear_prepack_fp16(weight.float(), bias)
    with packing_for(engine):
        return ops.linear_prepack(quantized_weight(weight, scale, zero_point), bias)


class RepackedKernel(KernelModule):
    """A subclass gives ``config_class``, ``buffer_names`` and ``_pack``; the engine's packed object is
    ``self.packed``."""

    _packed: Any

    def __init__(self, config: Any, tensors: Mapping[str, torch.Tensor | None]) -> None:
        super().__init__()
        self.config = config
        for name in self.buffer_names(config):
            tensor = tensors.get(name)
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self._packed = None

    @classmethod
    def buffer_names(cls, config: Any) -> Iterable[str]:
        """The names of all buffers; those of biases, which may be None, start with ``bias``."""
        raise NotImplementedError

    def _pack(self) -> Any:
        raise NotImplementedError

    @property
    def packed(self) -> Any:
        """The packed object, built again if it was dropped."""
        if self._packed is None:
            self._packed = self._pack()
        return self._packed

    @classmethod
    def from_artifact(
        cls, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]
    ) -> Self:
        """Build the kernel again from ``artifact_config()`` and its buffers.

        Raises ``ArtifactError`` when a tensor is missing.
        """
        decoded = decode_config(cls.config_class, config)
        names = cls.buffer_names(decoded)
        missing = [n for n in names if not n.startswith("bias") and tensors.get(n) is None]
        if missing:
            raise lacking(cls, missing)
        return cls(decoded, tensors)

    def _derived(self) -> dict[str, Any]:
        return {"_packed": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        tensors = {n: None if b is None else b.clone() for n, b in self._buffers.items()}
        copy = type(self)(self.config, tensors)
        copy.training = self.training
        memo[id(self)] = copy
        return copy

    def check_floats(self, x: torch.Tensor, features: int) -> None:
        """Raise ``InputError`` for what is no row, or rows, of so many floats."""
        if x.dtype not in _FLOATS or not x.dim() or x.shape[-1] != features:
            raise InputError(
                f"{self.name} takes float32 or 16-bit floats […, {features}]",
                where=f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}",
                fix="inputs of the dtype and shape that the float model takes",
            )
