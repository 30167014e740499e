from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.graph import own_buffers, own_tensors, shallow_copy


class Odd(nn.Module):
    """Keeps submodules in plain containers, too, and overrides a method by a bound one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.order = [self.fc, {"again": self.fc}]
        self.call = self.helper

    def helper(self) -> nn.Module:
        return self


def test_references_inside_of_containers_follow() -> None:
    model = Odd()
    copied = shallow_copy(model)
    assert copied.order[0] is copied.fc
    assert copied.order[1]["again"] is copied.fc
    assert copied.call() is copied
    copied.order.append(None)
    assert len(model.order) == 2


def test_parameters_added_to_the_copy_do_not_reach_the_model() -> None:
    model = Odd()
    copied = shallow_copy(model)
    copied.fc.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    copied.fc.weight = nn.Parameter(torch.zeros(2, 2))
    assert not hasattr(model.fc, "extra")
    assert model.fc.weight is not copied.fc.weight


def test_hooks_are_bound_to_the_copy() -> None:
    seen: list[nn.Module] = []

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.fc.register_forward_hook(self.hook)

        def hook(self, module, args, output):
            seen.append(self)

        def forward(self, x):
            return self.fc(x)

    copied = shallow_copy(Hooked())
    copied(torch.zeros(1, 2))
    assert seen == [copied]


def test_recurrent_modules_run_on_own_tensors() -> None:
    model = nn.LSTM(2, 3).eval()
    copied = own_tensors(model)
    x = torch.randn(4, 1, 2)
    assert torch.equal(copied(x)[0], model(x)[0])
    with torch.no_grad():
        copied.weight_ih_l0.zero_()
    assert not torch.equal(copied(x)[0], model(x)[0])


def test_ties_are_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    copied = own_tensors(model)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight is not model[0].weight
    assert copied[0].weight.requires_grad


def test_own_buffers_shield_batch_norm() -> None:
    model = nn.BatchNorm1d(2).train()
    own_buffers(model)(torch.randn(4, 2) + 5)
    assert torch.equal(model.running_mean, torch.zeros(2))
    assert int(model.num_batches_tracked) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_script_modules_are_shared() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    copied = shallow_copy(nn.Sequential(scripted, nn.ReLU()))
    assert copied[0] is scripted
    assert copied(torch.zeros(1, 2)).shape == (1, 2)
