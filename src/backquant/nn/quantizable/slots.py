"""Leaf modules with a slot for an observer of their output.

A slot is the attribute ``activation_post_process``: ``None``, an observer, a fake quantize, or a
``QuantizeDequantize``. The names in the ``state_dict`` are those of PyTorch's eager-mode observers,
which sit in forward hooks; a slot needs none, so that modules copy, pickle and store.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backquant.nn import qat
from backquant.nn.quantized.reference.linear import Linear as ReferenceLinear
from backquant.nn.stubs import QuantStub


class Slot(nn.Module):
    """Comes before a module in the bases of a class; the output goes through the slot."""

    activation_post_process: nn.Module | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation_post_process = None

    def _filled(self, output: torch.Tensor) -> torch.Tensor:
        slot = self.activation_post_process
        return output if slot is None else slot(output)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The module's own forward, then the slot."""
        return self._filled(super().forward(input))


class SlotLinear(Slot, nn.Linear):
    """``nn.Linear`` with a slot.

    >>> list(SlotLinear(1, 1).state_dict())
    ['weight', 'bias']
    """


class SlotQATLinear(Slot, qat.Linear):
    """``qat.Linear`` with a slot.

    >>> from types import SimpleNamespace
    >>> SlotQATLinear(2, 1, qconfig=SimpleNamespace(weight=nn.Identity))(torch.ones(1, 2)).shape
    torch.Size([1, 1])
    """


class SlotReferenceLinear(Slot, ReferenceLinear):
    """``quantized.reference.Linear`` with a slot.

    >>> SlotReferenceLinear(2, 1)(torch.ones(1, 2)).shape
    torch.Size([1, 1])
    """


class SlotSigmoid(Slot, nn.Sigmoid):
    """``nn.Sigmoid`` with a slot.

    >>> SlotSigmoid()(torch.zeros(1))
    tensor([0.5000])
    """


class SlotTanh(Slot, nn.Tanh):
    """``nn.Tanh`` with a slot.

    >>> SlotTanh()(torch.zeros(1))
    tensor([0.])
    """


class SlotQuantStub(Slot, QuantStub):
    """``QuantStub`` with a slot.

    >>> SlotQuantStub()(torch.zeros(1))
    tensor([0.])
    """


class FloatFunctional(Slot):
    """Functions with a slot for the observer of their result, for eager-mode style models.

    ``add_scalar`` and ``mul_scalar`` are not observed: their result has the qparams of the input,
    transformed. There is no forward.

    >>> FloatFunctional().add(torch.ones(1), torch.ones(1))
    tensor([2.])
    """

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """Not for use: call ``add``, ``mul``, ``cat``, …"""
        raise RuntimeError("FloatFunctional has no forward: call add, mul, cat, matmul, ...")

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``torch.add``, observed."""
        return self._filled(torch.add(x, y))

    def add_scalar(self, x: torch.Tensor, y: float) -> torch.Tensor:
        """``torch.add`` with a number."""
        return torch.add(x, y)

    def mul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``torch.mul``, observed."""
        return self._filled(torch.mul(x, y))

    def mul_scalar(self, x: torch.Tensor, y: float) -> torch.Tensor:
        """``torch.mul`` with a number."""
        return torch.mul(x, y)

    def cat(self, x: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """``torch.cat``, observed."""
        return self._filled(torch.cat(x, dim=dim))

    def add_relu(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``relu(add(x, y))``, observed."""
        return self._filled(torch.nn.functional.relu(torch.add(x, y)))

    def matmul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``torch.matmul``, observed."""
        return self._filled(torch.matmul(x, y))
