"""A linear module whose weight is fake-quantized while it trains."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from backquant.nn.qat.weight_fake_quantizer import QATModule


def linear_arguments(linear: nn.Module) -> dict[str, Any]:
    """The constructor arguments of a linear module like ``linear``, without its tensors.

    >>> linear_arguments(nn.Linear(2, 3, bias=False))
    {'in_features': 2, 'out_features': 3, 'bias': False}
    """
    sizes = {name: getattr(linear, name) for name in ("in_features", "out_features")}
    return {**sizes, "bias": linear.bias is not None}


class Linear(QATModule, nn.Linear):
    """``torch.nn.Linear`` with ``weight_fake_quant`` from ``qconfig.weight``.

    >>> from types import SimpleNamespace
    >>> linear = Linear(3, 2, qconfig=SimpleNamespace(weight=nn.Identity))
    >>> linear(torch.ones(1, 3)).shape, type(linear.to_float()).__module__
    (torch.Size([1, 2]), 'torch.nn.modules.linear')
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = nn.Linear
    _ROOT = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        qconfig: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._attach(qconfig)

    @classmethod
    def _arguments_of(cls, root: nn.Module) -> dict[str, Any]:
        return linear_arguments(root)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(*, in_features)`` to ``(*, out_features)``."""
        return F.linear(input, self.weight_fake_quant(self.weight), self.bias)
