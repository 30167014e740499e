"""Small models, and QConfigs that ask for something in particular."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backquant import QConfig
from backquant import observe as ob

SYMMETRIC, AFFINE = torch.per_tensor_symmetric, torch.per_tensor_affine
BY_CHANNEL = torch.per_channel_symmetric


def image(channels: int = 3, batch: int = 1, side: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, channels, side, side)


def matrix(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def conv(kernel: Any = 3, channels: int = 3, out: int = 8, **more: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(channels, out, kernel, **more))


def linear(features: int = 64, out: int = 16) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(features, out))


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


class Joins(nn.Module):
    """Two convolutions of very different ranges, joined; the result is reshaped."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        with torch.no_grad():
            self.two.weight.mul_(8.0)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.one(x), self.two(x)).reshape(1, -1)


def activation(dtype: torch.dtype = torch.qint8, qscheme: Any = AFFINE, **more: Any) -> Any:
    return ob.MinMaxObserver.with_args(dtype=dtype, qscheme=qscheme, **more)


def fixed(scale: float, zero_point: int = 0, dtype: torch.dtype = torch.qint8) -> Any:
    return ob.FixedQParamsObserver.with_args(
        scale=scale, zero_point=zero_point, dtype=dtype, quant_min=-128, quant_max=127
    )


def weight(dtype: torch.dtype = torch.qint8, low: int | None = -127, high: int | None = 127) -> Any:
    return ob.PerChannelMinMaxObserver.with_args(
        dtype=dtype, qscheme=BY_CHANNEL, quant_min=low, quant_max=high
    )


tensor_weight = ob.MinMaxObserver.with_args(
    dtype=torch.qint8, qscheme=SYMMETRIC, quant_min=-127, quant_max=127
)


def asked(inputs: Any, weights: Any = None, output: Any = None) -> Callable[[], QConfig]:
    weights = weight() if weights is None else weights
    return lambda: QConfig(inputs, weights) if output is None else QConfig(inputs, weights, output)


def groups_and_tokens(size: int = 32) -> QConfig:
    tokens = ob.PlaceholderObserver.with_args(
        dtype=torch.int8, is_dynamic=True, granularity="per_token"
    )
    return QConfig(tokens, ob.BlockMinMaxObserver.with_args(granularity=f"per_group(size={size})"))


def blocks(dtype: torch.dtype, size: int) -> Callable[[], QConfig]:
    """Weights alone, in groups of a row."""
    floats = ob.PlaceholderObserver.with_args(dtype=torch.float32)
    weights = ob.BlockMinMaxObserver.with_args(
        granularity=f"per_group(size={size})", dtype=dtype, qscheme=BY_CHANNEL
    )
    return lambda: QConfig(floats, weights)


def blocks_at_each_call(dtype: torch.dtype, size: int) -> Callable[[], QConfig]:
    """Weights and activations in groups of a row."""
    shared = f"per_group(size={size})"
    inputs = ob.PlaceholderObserver.with_args(dtype=dtype, is_dynamic=True, granularity=shared)
    weights = ob.BlockMinMaxObserver.with_args(granularity=shared, dtype=dtype, qscheme=BY_CHANNEL)
    return lambda: QConfig(inputs, weights)
