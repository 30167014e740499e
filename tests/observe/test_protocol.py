from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from torch import nn

from backquant import observe
from backquant.observe import (
    is_fake_quantize,
    is_fixed_qparams,
    is_noop,
    is_observer_or_fake_quantize,
    is_placeholder,
    is_reuse_input,
)


class UsersObserver(ao.ObserverBase):
    """As a user wrote it against PyTorch's base class."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.quint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def calculate_qparams(self) -> Any:
        return torch.tensor([1.0]), torch.tensor([0])


class UsersFakeQuantize(ao.FakeQuantizeBase):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def calculate_qparams(self) -> Any:
        return torch.tensor([1.0]), torch.tensor([0])


class DuckObserver(nn.Module):
    dtype = torch.quint8

    def calculate_qparams(self) -> Any:
        return torch.tensor([1.0]), torch.tensor([0])


@pytest.mark.parametrize("cls", [UsersObserver, UsersFakeQuantize, DuckObserver])
def test_users_classes_measure(cls: type[nn.Module]) -> None:
    assert is_observer_or_fake_quantize(cls())
    assert is_fake_quantize(cls()) == (cls is UsersFakeQuantize)


@pytest.mark.parametrize("package", [observe, ao])
def test_kinds_of_ours_and_of_pytorch(package: Any) -> None:
    checks = {
        is_placeholder: [package.PlaceholderObserver()],
        is_noop: [package.NoopObserver()],
        is_reuse_input: [package.ReuseInputObserver()],
        is_fixed_qparams: [
            package.default_fixed_qparams_range_0to1_observer(),
            package.default_fixed_qparams_range_0to1_fake_quant(),
        ],
        is_fake_quantize: [
            package.FakeQuantize(),
            package.FusedMovingAvgObsFakeQuantize(),
            package.default_fixed_qparams_range_0to1_fake_quant(),
        ],
    }
    modules = [m for found in checks.values() for m in found] + [package.MinMaxObserver()]
    for check, kind in checks.items():
        for module in modules:
            expected = any(type(module) is type(k) for k in kind)
            assert check(module) == expected, (check.__name__, type(module).__name__)
    assert all(map(is_observer_or_fake_quantize, modules))


@pytest.mark.parametrize(
    "thing", [nn.Identity(), nn.ReLU(), nn.LSTM(1, 1), None, observe.MinMaxObserver, "reshape"]
)
def test_other_things_do_not_measure(thing: Any) -> None:
    for check in (is_observer_or_fake_quantize, is_fake_quantize, is_placeholder, is_fixed_qparams):
        assert not check(thing)
