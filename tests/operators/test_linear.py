from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.nn import intrinsic
from backquant.operators.linear import fuse_bn_leaky_relu


def test_batch_norm_is_folded_and_the_slope_kept() -> None:
    torch.manual_seed(0)
    linear, norm, leaky = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.LeakyReLU(0.3)
    assert norm.running_mean is not None
    norm.running_mean.uniform_(-1, 1)
    parts = nn.Sequential(linear, norm, leaky).eval()
    fused = fuse_bn_leaky_relu(False, *parts)
    assert type(fused) is intrinsic.LinearLeakyReLU
    x = torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), parts(x))


def test_training_is_refused() -> None:
    with pytest.raises(ConfigError, match="no module for training") as error:
        fuse_bn_leaky_relu(True, nn.Linear(3, 2), nn.BatchNorm1d(2), nn.LeakyReLU())
    assert error.value.fix
