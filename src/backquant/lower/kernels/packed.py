"""The life of a prepacked weight: built from the integer weight, dropped whenever that may change.

Invariants

1. Everything that is stored (``state_dict``, pickle, deepcopy, artifact) is the integer weight, its
   scales, the float bias and a JSON-able configuration; never the packed weight.
2. The packed weight is built at construction, and again at the first call after a copy, a load or a
   move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from backquant.errors import ArtifactError
from backquant.lower.kernels.configured import KernelModule, decode_config

__all__ = ["PackedKernel", "WeightTensors"]


@dataclass(frozen=True)
class WeightTensors:
    """An integer weight: int8 ``weight``, float32 ``scale`` and int64 ``zero_point`` (0-d, or one
    entry per output channel), float32 ``bias`` ``[out]`` or None."""

    weight: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    bias: torch.Tensor | None


class PackedKernel(KernelModule):
    """A kernel module with a prepacked weight.

    A subclass gives ``config_class`` (a frozen dataclass of JSON-able fields) and ``_pack``.
    """

    kernel: ClassVar[str]
    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_zero_point: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, config: Any, tensors: WeightTensors) -> None:
        super().__init__()
        self.config = config
        scale, zero_point = tensors.scale.reshape(-1), tensors.zero_point.reshape(-1)
        self.register_buffer("weight", tensors.weight.detach())
        self.register_buffer("weight_scale", scale.detach())
        self.register_buffer("weight_zero_point", zero_point.detach())
        bias = tensors.bias
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self._packed: Any = None
        self._repack()

    def _pack(self) -> Any:
        raise NotImplementedError

    def _repack(self) -> Any:
        self._packed = self._pack()
        return self._packed

    @property
    def name(self) -> str:
        return self.kernel

    @classmethod
    def from_artifact(
        cls, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]
    ) -> PackedKernel:
        """Build the kernel again from ``artifact_config()`` and its buffers.

        Raises ``ArtifactError`` when a tensor is missing.
        """
        needed = ("weight", "weight_scale", "weight_zero_point")
        missing = [name for name in needed if tensors.get(name) is None]
        if missing:
            raise ArtifactError(
                f"{cls.__name__} lacks {', '.join(missing)}",
                where=cls.__name__,
                fix="save the model again: backquant.save(quantized, path)",
            )
        weight, scale, zero_point = (tensors[name] for name in needed)
        assert weight is not None and scale is not None and zero_point is not None
        weights = WeightTensors(weight, scale, zero_point, tensors.get("bias"))
        return cls(decode_config(cls.config_class, config), weights)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedKernel:
        tensors = WeightTensors(
            self.weight.clone(),
            self.weight_scale.clone(),
            self.weight_zero_point.clone(),
            None if self.bias is None else self.bias.clone(),
        )
        copy = type(self)(self.config, tensors)
        copy.training = self.training
        memo[id(self)] = copy
        return copy

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._packed = None
        super()._apply(fn, recurse)
        # .half() or .bfloat16() must not touch what the kernel reads as float32.
        self.weight_scale = self.weight_scale.float()
        if self.bias is not None:
            self.bias = self.bias.float()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._packed = None
