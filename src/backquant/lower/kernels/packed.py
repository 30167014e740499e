"""The life of a prepacked weight: built from the integer weight, dropped whenever that may change.

Invariants

1. Everything that is stored (``state_dict``, pickle, deepcopy, artifact) is the integer weight, its
   scales, the float bias and a JSON-able configuration; never the packed weight.
2. A packed weight is built at the first call, and again after a copy, a load or a move. Buffers that
   are written in place are not noticed: use ``load_state_dict``.
3. The best layout may depend on the spatial size of the input, and with another one oneDNN reorders
   the weight at every call (an odd number of channels: 20 times the convolution). So there is one
   packed weight per spatial size, for the first few sizes; further ones use that of the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from backquant.errors import InputError
from backquant.lower.kernels.configured import KernelModule, decode_config, lacking

_INTEGERS = (torch.uint8, torch.int8)
PACKINGS = 3  # packed weights per kernel at most; each is as large as the integer weight


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
        self._packed: dict[tuple[int, ...], Any] = {}
        self._dims = len(getattr(config, "stride", ()))
        transposed = getattr(config, "operator", "").startswith("conv_transpose")
        inputs, groups = tensors.weight.shape[0 if transposed else 1], getattr(config, "groups", 1)
        self._channels = inputs if transposed else inputs * groups

    def check_input(self, x: torch.Tensor) -> None:
        """Raise ``InputError`` for inputs whose shape the engine does not check, and would read past the
        end of."""
        # dimensions that are not spatial: channels, and for a convolution possibly a batch
        extra = x.dim() - self._dims
        fits = extra in (1, 2) if self._dims else extra > 0
        if fits and not x.numel() and x.shape[:1].numel():
            # an empty image would be a result of padding alone
            fits = 0 not in x.shape[x.dim() - self._dims :]
        if not fits or x.shape[-1 - self._dims] != self._channels or x.dtype not in _INTEGERS:
            spatial = ", …" * self._dims
            raise InputError(
                f"{self.name} takes 8-bit integers […, {self._channels}{spatial}]",
                where=f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}",
                fix="inputs of the shape that the float model takes",
            )

    def _pack(self, size: tuple[int, ...]) -> Any:
        """The weight packed for inputs of spatial size ``size`` (a linear layer: empty)."""
        raise NotImplementedError

    def packed_for(self, size: tuple[int, ...]) -> Any:
        """What ``_pack(size)`` made once, or (invariant 3) made for the size nearest to it."""
        found = self._packed.get(size)
        if found is not None:
            return found
        if len(self._packed) < PACKINGS:
            found = self._packed[size] = self._pack(size)
            return found
        area = math.prod(size)
        nearest = min(tuple(self._packed), key=lambda known: abs(math.prod(known) - area))
        return self._packed[nearest]

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
            raise lacking(cls, missing)
        weight, scale, zero_point = (tensors[name] for name in needed)
        assert weight is not None and scale is not None and zero_point is not None
        weights = WeightTensors(weight, scale, zero_point, tensors.get("bias"))
        return cls(decode_config(cls.config_class, config), weights)

    def _derived(self) -> dict[str, Any]:
        return {"_packed": {}}

    def tensors(self) -> WeightTensors:
        """The integer weight, as the kernel was given it."""
        return WeightTensors(self.weight, self.weight_scale, self.weight_zero_point, self.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedKernel:
        own = vars(self.tensors()).items()
        tensors: Any = {name: None if tensor is None else tensor.clone() for name, tensor in own}
        copy = type(self)(self.config, WeightTensors(**tensors))
        copy.training = self.training
        memo[id(self)] = copy
        return copy

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        for packed in self._packed.values():
            parts = packed if isinstance(packed, tuple) else (packed,)
            yield from (part for part in parts if isinstance(part, torch.Tensor))
