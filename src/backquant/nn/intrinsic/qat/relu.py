"""A ReLU after any QAT module."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from backquant.nn.intrinsic.fused import FusedModule


class ReLUAfter(FusedModule):
    """Comes before a QAT module in the bases of a class."""

    _FUSED_FLOAT_MODULE: ClassVar[type[nn.Module]]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output of the QAT module, through a ReLU."""
        return F.relu(super().forward(input))

    def to_float(self) -> nn.Module:
        """A new fused float module: root and ReLU."""
        root = super().to_float()  # type: ignore[misc]  # of the QAT module
        relu = nn.ReLU().train(self.training)
        return self._FUSED_FLOAT_MODULE(root, relu)
