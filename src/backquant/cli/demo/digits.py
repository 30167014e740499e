"""The demo's data and model: handwritten digits (8×8 scans shipped inside scikit-learn), a residual CNN.

Data: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from backquant.errors import MissingExtraError


@dataclass(frozen=True)
class Digits:
    """Images as float32 ``(N, 1, 8, 8)`` in [0, 1]; labels as int64 ``(N,)``."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits() -> Digits:
    """The 1,797 scans, shuffled with a fixed seed; a quarter is held out for tests."""
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(
            "the demo reads the digits that scikit-learn ships, and scikit-learn is not installed",
            extra="demo",
        ) from error
    raw = datasets.load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = len(labels) // 4
    test, rest = order[:held_out], order[held_out:]
    return Digits(images[rest], labels[rest], images[test], labels[test])


class Block(nn.Module):
    """conv-bn-relu-conv-bn plus the skip, then ReLU; the first convolution may halve the image."""

    def __init__(self, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: torch.Tensor = self.relu(y + self.shortcut(x))
        return out


class DigitsNet(nn.Module):
    """Six convolutions in two residual blocks and a stem, 64 to 128 channels, then pooling and a linear.

    Input float32 ``(N, 1, 8, 8)``, output logits ``(N, 10)``.
    """

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.block1 = Block(width, width)
        self.block2 = Block(width, 2 * width, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.block2(self.block1(self.stem(x))))
        logits: torch.Tensor = self.head(torch.flatten(x, 1))
        return logits


def train(
    model: nn.Module,
    data: Digits,
    epochs: int = 8,
    progress: Callable[[int], None] = lambda _: None,
) -> nn.Module:
    """Adam with a one-cycle schedule; leaves the model in eval mode. Seconds on one core."""
    generator = torch.Generator().manual_seed(0)
    batch = 64
    steps = epochs * -(-len(data.train_labels) // batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        for index in torch.randperm(len(data.train_labels), generator=generator).split(batch):
            loss = F.cross_entropy(model(data.train_images[index]), data.train_labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        progress(epoch + 1)
    return model.eval()


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of images whose largest logit is at their label."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
