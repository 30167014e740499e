from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.operators import conv_add


def _parts() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.BatchNorm2d(3), nn.Conv2d(2, 3, 1)


@pytest.mark.parametrize(
    "fuse",
    [
        lambda is_qat, operand: conv_add.fuse_left(is_qat, torch.add, operand, None),
        lambda is_qat, operand: conv_add.fuse_right(is_qat, torch.add, None, operand),
        lambda is_qat, operand: conv_add.fuse_left_relu(
            is_qat, nn.ReLU(), (torch.add, operand, None)
        ),
        lambda is_qat, operand: conv_add.fuse_right_relu(
            is_qat, nn.ReLU(), (torch.add, None, operand)
        ),
    ],
    ids=["left", "right", "left_relu", "right_relu"],
)
def test_batch_norm_is_refused_for_training(fuse: object) -> None:
    assert callable(fuse)
    norm, conv = _parts()
    assert fuse(True, conv)[0] is conv
    with pytest.raises(ConfigError, match="no module for training") as error:
        fuse(True, (norm, conv))
    assert error.value.where == "Conv2d, BatchNorm2d, add"


def test_parts_are_left_unchanged() -> None:
    norm, conv = _parts()
    norm.eval()
    conv.eval()
    before = {k: v.clone() for k, v in conv.state_dict().items()}
    fused = conv_add.fuse_left(False, torch.add, (norm, conv), None)
    assert fused[0] is not conv
    assert all(torch.equal(before[k], v) for k, v in conv.state_dict().items())


def test_getters_find_root_and_other_operand() -> None:
    left, right = ("add", ("bn", "conv"), "y"), ("add", "y", ("bn", "conv"))
    assert conv_add.root_left(left) == conv_add.root_right(right) == "conv"
    assert conv_add.extra_inputs_left(left) == conv_add.extra_inputs_right(right) == ["y"]
    assert conv_add.root_left_relu(("relu", left)) == "conv"
    assert conv_add.root_right_relu(("relu", right)) == "conv"
    assert conv_add.extra_inputs_left_relu(("relu", left)) == ["y"]
    assert conv_add.extra_inputs_right_relu(("relu", right)) == ["y"]
