"""The reference form of ``torch.nn.Linear``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from backquant.nn.quantized.reference.module import (
    ReferenceModule,
    bare,
    float_bias,
    float_weight,
    take_bias,
)

_LinearT = TypeVar("_LinearT", bound="Linear")


class Linear(ReferenceModule, nn.Linear):
    """``torch.nn.Linear`` on an integer weight ``(out_features, in_features)``.

    Input ``(*, in_features)`` float, output ``(*, out_features)`` float. Attributes: see
    ``ReferenceModule``.

    >>> qparams = {"qscheme": torch.per_tensor_affine, "dtype": torch.qint8, "scale": 0.5,
    ...            "zero_point": 0}
    >>> linear = nn.Linear(2, 1, bias=False)
    >>> _ = linear.weight.data.copy_(torch.tensor([[0.6, -1.1]]))
    >>> reference = Linear.from_float(linear, qparams)
    >>> reference.weight, reference(torch.ones(1, 2))
    (tensor([[ 1, -2]], dtype=torch.int8), tensor([[-0.5000]]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias_: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight_qparams: Mapping[str, Any] | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias_, device=device, dtype=dtype)
        self._store_weight(self.weight, weight_qparams)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input ``(*, in_features)``, output ``(*, out_features)``, both float."""
        return F.linear(x, self.dequantized_weight(), self.bias)

    @classmethod
    def from_float(
        cls: type[_LinearT], float_linear: nn.Module, weight_qparams: Mapping[str, Any]
    ) -> _LinearT:
        """Quantize the weight of ``float_linear``, which is left as it is and shares nothing.

        Raises ``ConfigError`` for qparams that do not fit its weight.
        """
        weight, bias = float_weight(float_linear), float_bias(float_linear)
        out_features, in_features = weight.shape
        reference = bare(cls, {"in_features": in_features, "out_features": out_features})
        reference._store_weight(weight, weight_qparams)
        take_bias(reference, bias)
        reference.train(float_linear.training)
        return reference
