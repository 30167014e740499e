"""A model that fuses in several ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Mixed(nn.Module):
    """conv-bn-relu, conv-bn, conv-F.relu, linear-relu, a batch norm on its own, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.conv = nn.Conv2d(4, 4, 1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.tail = nn.Conv2d(4, 4, 1)
        self.alone = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.register_buffer("shift", torch.ones(4, 1, 1))

    def forward(self, x):
        x = self.bn(self.conv(self.block(x))) + self.shift
        x = F.relu(self.tail(x), inplace=True)
        return self.head(self.alone(x).mean((2, 3)))


def settle(model: nn.Module) -> nn.Module:
    """Eval mode with batch norms that do something."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight)
            nn.init.uniform_(module.bias)
    return model.eval()


@pytest.fixture
def mixed() -> nn.Module:
    return settle(Mixed())


@pytest.fixture
def settled():
    return settle
