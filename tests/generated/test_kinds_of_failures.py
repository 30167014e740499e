"""The kinds of failures that generated models were first found with, each as a model of its own.

Inputs that no float model takes (float64, float16, integers, complex) and those that are not finite are in
``tests/trust/test_inputs.py``; each model here is called with some of them, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from generated.check import ENGINES, Result, compare
from generated.families import Call, Drawn


@dataclass(frozen=True)
class Kind:
    """``scale``: of the weights; ``engines``: those that it was found on."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    engines: tuple[str, ...] = ENGINES
    scale: float = 1.0


def chunked() -> nn.Module:
    first = Call("chunk", lambda x: x.chunk(2, 1)[0])
    return nn.Sequential(nn.Conv2d(3, 4, 1), first, nn.ReLU(), nn.Conv2d(2, 3, 1))


def to_one_pixel() -> nn.Module:
    large = Call("large", lambda x: x * 1000)
    return nn.Sequential(large, nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))


def transposed_and_pooled() -> nn.Module:
    up = nn.ConvTranspose1d(4, 6, 3, stride=2)
    return nn.Sequential(up, nn.AvgPool1d(2), nn.Hardswish(), nn.GELU())


def transposed() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(3, 5, 3, stride=2, padding=1), nn.ReLU())


def outliers() -> nn.Module:
    one = Call("outliers", lambda x: torch.cat([x[:, :1] * 1e4, x[:, 1:]], 1))
    return nn.Sequential(nn.ReLU(), one, nn.Conv2d(3, 2, 3))


FEW = ("fbgemm", "native")
KINDS = {
    "chunk": Kind(chunked, (2, 3, 5, 5)),
    "layer norm over several trailing axes": Kind(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.LayerNorm([4, 5, 5])), (2, 3, 5, 5)
    ),
    "group norm": Kind(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)), (2, 3, 5, 5)),
    "group norm of two dimensions": Kind(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)), (5, 3)
    ),
    "transposed, pooled, hard-swish, GELU": Kind(transposed_and_pooled, (2, 4, 7), ("qnnpack",)),
    "average pooling of large values to one pixel": Kind(to_one_pixel, (2, 3, 9, 9), ("qnnpack",)),
    "transposed convolution": Kind(transposed, (2, 3, 6, 6), ("qnnpack", "x86")),
    "transposed convolution, large weights": Kind(
        transposed, (2, 3, 6, 6), ("qnnpack", "x86"), 100.0
    ),
    "convolution of one channel": Kind(lambda: nn.Conv2d(1, 1, 3), (2, 1, 7, 7), FEW),
    "convolution of few channels, large weights": Kind(
        lambda: nn.Conv2d(3, 2, 3), (2, 3, 7, 7), FEW, 100.0
    ),
    "linear layer of one feature": Kind(lambda: nn.Linear(1, 1), (4, 1), FEW),
    "linear layer of few features, large weights": Kind(
        lambda: nn.Linear(3, 2), (4, 3), FEW, 100.0
    ),
    "outliers": Kind(outliers, (2, 3, 7, 7), FEW),
    "softplus in front of a linear layer": Kind(
        lambda: nn.Sequential(nn.Softplus(), nn.Linear(8, 5)), (4, 8), ("x86",)
    ),
}
CASES = [(name, engine) for name, kind in KINDS.items() for engine in kind.engines]


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_a_kind_of_failure(name: str, engine: str) -> None:
    """No raw error, each kernel within a step, recorded calls equal to the interpreted graph."""
    kind = KINDS[name]
    compared = 0
    for seed in range(2):
        torch.manual_seed(seed)
        model = kind.model().eval()
        for parameter in model.parameters():
            parameter.data.mul_(kind.scale)
        made = Drawn(model, kind.shape)
        found = compare(made, engine, random.Random(seed), Result(seed, engine, name))
        assert found.findings == []
        assert not found.refused
        compared += found.compared
    assert compared
