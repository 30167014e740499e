"""FixedQParamsObserver: scale and zero point are given, not measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backquant.errors import ConfigError
from backquant.observe.base import ObserverBase


class FixedQParamsObserver(ObserverBase):
    """Has fixed qparams, for operators whose output range is known, such as sigmoid (0 to 1). Per
    tensor.

    Arguments are those of PyTorch's class. Raises ConfigError for ``is_dynamic=True``.

    >>> FixedQParamsObserver(scale=1 / 256, zero_point=0).calculate_qparams()
    (tensor([0.0039]), tensor([0], dtype=torch.int32))
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(  # the signature is PyTorch's
        self,
        scale: float,
        zero_point: int,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        quant_min: int = 0,
        quant_max: int = 255,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        if is_dynamic:
            raise ConfigError(
                "fixed qparams cannot be measured at inference",
                where="FixedQParamsObserver(is_dynamic=True)",
                fix="leave is_dynamic=False",
            )
        super().__init__(dtype=dtype, is_dynamic=is_dynamic, **kwargs)
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.qscheme = qscheme
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float))
        self.register_buffer("zero_point", torch.tensor([zero_point], dtype=torch.int))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``; nothing is recorded."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The given scale (float32 ``[1]``) and zero point (int32 ``[1]``)."""
        return self.scale, self.zero_point

    def _merge_settings(self) -> dict[str, Any]:
        return {
            **super()._merge_settings(),
            "qscheme": self.qscheme,
            "quant_min": self.quant_min,
            "quant_max": self.quant_max,
            "scale": self.scale.tolist(),
            "zero_point": self.zero_point.tolist(),
        }

    def _absorb(self, other: FixedQParamsObserver) -> None:
        """Equal settings are all there is."""

    def extra_repr(self) -> str:
        return f"scale={self.scale.item()}, zero_point={self.zero_point.item()}"
