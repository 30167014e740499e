"""A linear module whose weight is fake-quantized while it trains."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from backquant.nn.qat.parts import (
    adopt,
    checked_float_module,
    fresh_float_copy,
    weight_fake_quant_of,
)

_QATLinear = TypeVar("_QATLinear", bound="Linear")


class Linear(nn.Linear):
    """``torch.nn.Linear`` with ``weight_fake_quant`` from ``qconfig.weight``.

    >>> from types import SimpleNamespace
    >>> linear = Linear(3, 2, qconfig=SimpleNamespace(weight=nn.Identity))
    >>> linear(torch.ones(1, 3)).shape, type(linear.to_float()).__module__
    (torch.Size([1, 2]), 'torch.nn.modules.linear')
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = nn.Linear
    weight_fake_quant: nn.Module

    def __init__(  # size: PyTorch's signature
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        qconfig: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.qconfig = qconfig
        self.weight_fake_quant = weight_fake_quant_of(
            qconfig, f"qat.{type(self).__name__}", self.weight.device
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(*, in_features)`` to ``(*, out_features)``."""
        return F.linear(input, self.weight_fake_quant(self.weight), self.bias)

    @classmethod
    def from_float(
        cls: type[_QATLinear],
        mod: nn.Module,
        use_precomputed_fake_quant: bool = False,  # noqa: ARG003
    ) -> _QATLinear:
        """The QAT form of ``mod``, which needs a ``qconfig``; it shares the parameters of ``mod``.

        Sharing keeps tied weights tied; who wants ``mod`` to stay as it is copies it before.
        ``use_precomputed_fake_quant`` has no effect, as in PyTorch. Raises ``ConfigError`` for a
        module of another type, or without ``qconfig``.
        """
        float_module = checked_float_module(cls, mod, cls._FLOAT_MODULE)
        linear = float_module[0] if isinstance(float_module, nn.Sequential) else float_module
        assert isinstance(linear, nn.Linear)
        qat = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            qconfig=float_module.qconfig,
            device="meta",
        )
        adopt(qat, linear, mod)
        return qat

    def to_float(self) -> nn.Module:
        """A new float module with copies of the trained parameters."""
        linear = nn.Linear(
            self.in_features, self.out_features, bias=self.bias is not None, device="meta"
        )
        return fresh_float_copy(linear, self)
