"""Models of several families, and PyTorch's own decisions about them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from against_torch.oracle import Oracle, pattern_key, torch_decides, torch_prepares


class Residual(nn.Module):
    """Convolutions with batch norm, a residual sum, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        y = self.relu(y)
        return self.fc(torch.flatten(self.pool(y), 1))


class InvertedResidual(nn.Module):
    """Depthwise separable convolutions with ReLU6, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6()
        )
        self.project = nn.Sequential(nn.Conv2d(16, 4, 1, bias=False), nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.project(self.depthwise(self.expand(x)))
        return F.adaptive_avg_pool2d(x + y, 1).reshape(x.shape[0], -1)


class Dense(nn.Module):
    """Concatenation of all earlier outputs, batch norm before the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 * (i + 1)) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(4 * (i + 1), 4, 3, padding=1) for i in range(3))
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        return self.pool(torch.cat(features, dim=1))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.act = nn.Hardswish()
        self.down = nn.Conv2d(8, 2, 1)
        self.up = nn.Conv2d(2, 8, 1)
        self.gate = nn.Hardsigmoid()
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x):
        x = self.act(self.conv(x))
        s = F.adaptive_avg_pool2d(x, 1)
        s = self.gate(self.up(F.relu(self.down(s))))
        x = x * s
        return self.softmax(x.mean([2, 3]))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(8, 8),
            nn.GELU(),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.LeakyReLU(),
            nn.LayerNorm(8),
            nn.Linear(8, 2),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.layers(x)


class Functional(nn.Module):
    """No submodules: parameters, functions and methods only."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.b1 = nn.Parameter(torch.randn(4))
        self.w2 = nn.Parameter(torch.randn(5, 16))
        self.b2 = nn.Parameter(torch.randn(5))

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.w1, self.b1, padding=1))
        x = F.max_pool2d(x, 2)
        x = torch.relu(torch.add(x, x))
        x = x.view(x.size(0), -1)
        x = F.linear(x, self.w2, bias=self.b2).sigmoid()
        return (x * 2).permute(1, 0).contiguous() + x.shape[0]


class Shared(nn.Module):
    """One ReLU after every layer, and one linear layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.twice.weight

    def forward(self, x):
        x = self.relu(self.first(x))
        x = self.relu(self.twice(x))
        x = self.relu(self.twice(x))
        return self.relu(self.tied(x)) + torch.tanh(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x, mask):
        scores = torch.matmul(x, x.transpose(1, 2)) / x.size(-1) ** 0.5
        scores = scores.masked_fill(mask, -1e9).softmax(-1)
        x = torch.bmm(scores, self.norm(x)) + x
        return x + self.fc2(F.gelu(self.fc1(x)))


class Attention(nn.Module):
    """Attention by hand, with a mask, matrix products and shape arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x, mask):
        x = self.embed(x)
        keep = torch.logical_not(mask)
        for block in self.blocks:
            x = block(x, keep)
        b, t = x.size(0), x.shape[1]
        return x.reshape(b * t, -1).unsqueeze(0).squeeze(0)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "residual": (Residual, (torch.zeros(1, 3, 8, 8),)),
    "inverted": (InvertedResidual, (torch.zeros(1, 4, 8, 8),)),
    "dense": (Dense, (torch.zeros(1, 4, 8, 8),)),
    "squeeze": (SqueezeExcite, (torch.zeros(1, 3, 8, 8),)),
    "mlp": (Mlp, (torch.zeros(1, 6),)),
    "functional": (Functional, (torch.zeros(1, 3, 4, 4),)),
    "shared": (Shared, (torch.zeros(1, 4),)),
    "attention": (Attention, (torch.zeros(1, 3, 4), torch.zeros(1, 3, 3, dtype=torch.bool))),
}


@pytest.fixture(params=sorted(MODELS))
def zoo_model(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A model of the zoo in eval mode, with example inputs."""
    torch.manual_seed(0)
    make, inputs = MODELS[request.param]
    return SimpleNamespace(name=request.param, model=make().eval(), inputs=inputs)


@pytest.fixture
def oracle() -> Callable[..., Oracle]:
    """``oracle(model, inputs, torch_mapping, torch_backend) -> Oracle``."""
    return torch_decides


@pytest.fixture
def observed_by_torch() -> Callable[..., set[str]]:
    """Names of the nodes that PyTorch observes; the arguments are those of ``oracle``."""
    return lambda *args: set(torch_prepares(*args).observed_node_names)


@pytest.fixture
def key_of_pattern() -> Callable[[Any], str]:
    return pattern_key
