from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from backquant.lower import engine as engines
from backquant.lower.engine import MachineFacts


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.relu(x + self.bn(self.conv(x))))


class Net(nn.Module):
    """Some of everything: fused, quantized, left in float, shared, in training mode, hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.act = nn.ReLU(inplace=True)
        self.block = Block()
        self.norm = nn.GroupNorm(2, 4)
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.block(self.act(self.stem(x))))
        y = self.norm(x).mean([2, 3]) * self.scale
        return self.fc(self.fc(y))


@pytest.fixture
def net() -> nn.Module:
    """In mixed training modes, with a hook, a frozen parameter and a gradient."""
    model = Net()
    model.block.bn.eval()
    model.fc.weight.requires_grad_(False)
    model.scale.grad = torch.ones(4)
    model.fc.register_forward_hook(lambda module, args, output: None)
    model.note = "a user's own attribute"
    return model


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An ARM CPU whose torch has qnnpack only."""
    facts = MachineFacts("aarch64", quantized_engines=("qnnpack",), torch_version=torch.__version__)
    monkeypatch.setattr(engines, "machine_facts", lambda: facts)
    yield
