"""Markers for the borders of the quantized part of a model, and a wrapper that sets both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Stub(nn.Module):
    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()
        if qconfig is not None:
            self.qconfig = qconfig

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any tensor, returned as it is."""
        return x


class QuantStub(_Stub):
    """Marks where a float tensor enters the quantized part of a model; the identity in float. ``qconfig``
    says how the tensor is observed.

    >>> QuantStub()(torch.ones(1))
    tensor([1.])
    """


class DeQuantStub(_Stub):
    """Marks where a tensor leaves the quantized part of a model; the identity in float.

    >>> DeQuantStub()(torch.ones(1))
    tensor([1.])
    """


class QuantWrapper(nn.Module):
    """``dequant(module(quant(x)))``, with the training flag and the ``qconfig`` of ``module``.

    >>> QuantWrapper(nn.ReLU())(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        qconfig = getattr(module, "qconfig", None)
        self.quant = QuantStub(qconfig)
        self.dequant = DeQuantStub(qconfig)
        self.module = module
        self.training = module.training
        self.quant.training = self.dequant.training = module.training

    def forward(self, X: torch.Tensor) -> torch.Tensor:  # noqa: N803 - PyTorch's argument name
        """Whatever ``module`` takes as its one input."""
        y: torch.Tensor = self.dequant(self.module(self.quant(X)))
        return y
