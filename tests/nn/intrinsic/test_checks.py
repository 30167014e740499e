"""Conditions of fusion."""

from __future__ import annotations

import pytest
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.intrinsic.rank import require_same_mode, require_trainable


def test_modes() -> None:
    require_same_mode(nn.ReLU().eval(), nn.ReLU().eval(), nn.ReLU().eval())
    with pytest.raises(ConfigError, match="cannot fuse ReLU, Tanh") as error:
        require_same_mode(nn.ReLU().eval(), nn.Tanh())
    assert "False, True" in error.value.where


@pytest.mark.parametrize(
    ("bn", "message"),
    [
        (nn.BatchNorm2d(3), "4 output channels do not fit a batch norm of 3"),
        (nn.BatchNorm2d(4, track_running_stats=False), "track_running_stats=True"),
    ],
)
def test_batch_norms_that_cannot_train(bn: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        require_trainable(bn, 4)
    assert "BatchNorm2d(4" in error.value.fix
