"""Training a module and the oracle's side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.ao.nn.intrinsic as oracle
import torch.ao.nn.intrinsic.qat
from torch import nn

import backquant.nn.intrinsic.qat  # noqa: F401 - intrinsic.qat
from backquant.nn import intrinsic


def train_both(
    ours: nn.Module,
    theirs: nn.Module,
    shape: tuple[int, ...],
    steps: int = 8,
    between: Callable[[int, nn.Module], None] = lambda step, module: None,
) -> None:
    """Same data, same SGD; after every step output, gradients and state are equal bit for bit."""
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (ours, theirs)
    ]
    for step in range(steps):
        x = torch.randn(shape)
        outputs, gradients = [], []
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            between(step, module)
            own = x.clone().requires_grad_()
            optimizer.zero_grad()
            y = module(own)
            (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
            optimizer.step()
            outputs.append(y.detach())
            gradients.append([own.grad, *(p.grad for p in module.parameters())])
        assert torch.isfinite(outputs[0]).all()
        assert torch.equal(*outputs), f"outputs differ at step {step}"
        for one, two in zip(*gradients, strict=True):
            assert (one is None) == (two is None)
            assert one is None or torch.equal(one, two), f"gradients differ at step {step}"
        for key, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[key], value), f"{key} differs at step {step}"


@pytest.fixture
def train_side_by_side() -> Callable[..., None]:
    return train_both


@pytest.fixture
def pair() -> Callable[..., tuple[nn.Module, nn.Module]]:
    """``pair(name, parts, qconfig)``: our QAT module and the oracle's, of equal parameters."""

    def make(name: str, parts: list[nn.Module], qconfig: object) -> tuple[nn.Module, nn.Module]:
        made = []
        for floats, trained in ((intrinsic, intrinsic.qat), (oracle, oracle.qat)):
            own = copy.deepcopy(parts)
            block = getattr(floats, name)(*own)
            for module in (block, own[0]):  # PyTorch takes the root's, not the block's
                module.qconfig = qconfig
            made.append(getattr(trained, name).from_float(block))
        return made[0], made[1]

    return make
