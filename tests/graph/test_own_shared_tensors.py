from __future__ import annotations

import torch
from torch import nn

from backquant.graph import own_shared_tensors


def test_shared_tensors_are_copied_and_others_are_not() -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].weight = source[0].weight
    module[1].running_mean = source[1].running_mean
    kept = module[0].bias
    module[1].register_buffer("view", source[0].weight.detach()[0])
    own_shared_tensors(module, source)
    assert module[0].weight is not source[0].weight and torch.equal(
        module[0].weight, source[0].weight
    )
    assert module[1].running_mean is not source[1].running_mean and module[0].bias is kept
    with torch.no_grad():
        source[0].weight.zero_()
    assert module[1].view.any() and module[0].weight.any()


def test_ties_strides_and_flags_are_kept() -> None:
    source = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    source.weight.requires_grad_(False)
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    first.weight = second.weight = source.weight
    own_shared_tensors(nn.ModuleList([first, second]), source)
    assert first.weight is second.weight is not source.weight
    assert first.weight.stride() == source.weight.stride() and not first.weight.requires_grad


def test_recurrent_modules_use_their_own_weights() -> None:
    source, module = nn.LSTM(2, 2), nn.LSTM(2, 2)
    module._parameters.update(source._parameters)
    own_shared_tensors(module, source)
    assert module._flat_weights[0] is module.weight_ih_l0 is not source.weight_ih_l0
    x = torch.randn(3, 1, 2)
    assert torch.equal(module(x)[0], source(x)[0])
