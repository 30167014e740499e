"""Folding against ``torch.nn.utils.fusion``, and where it differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from backquant.errors import ConfigError
from backquant.nn.intrinsic.fold import fold_batch_norm

ROOTS: list[tuple[Any, Any, tuple[int, ...]]] = [
    (lambda b: nn.Conv1d(4, 6, 3, groups=2, bias=b), nn.BatchNorm1d, (2, 4, 8)),
    (lambda b: nn.Conv2d(4, 6, 3, padding=1, bias=b), nn.BatchNorm2d, (2, 4, 6, 6)),
    (lambda b: nn.Conv3d(4, 6, 2, bias=b), nn.BatchNorm3d, (2, 4, 4, 4, 4)),
    (lambda b: nn.ConvTranspose1d(4, 6, 3, bias=b), nn.BatchNorm1d, (2, 4, 8)),
    (lambda b: nn.ConvTranspose2d(4, 6, 3, stride=2, bias=b), nn.BatchNorm2d, (2, 4, 5, 5)),
    (lambda b: nn.ConvTranspose3d(4, 6, 2, bias=b), nn.BatchNorm3d, (2, 4, 3, 3, 3)),
    (lambda b: nn.Linear(4, 6, bias=b), nn.BatchNorm1d, (5, 4)),
]


def trained_norm(cls: type[nn.Module], channels: int, **options: Any) -> Any:
    """A batch norm in eval mode whose statistics and parameters are not the initial ones."""
    bn: Any = cls(channels, eps=1e-3, **options).eval()
    if bn.track_running_stats:
        bn.running_mean.normal_()
        bn.running_var.uniform_(0.2, 3.0)
    if bn.affine:
        nn.init.normal_(bn.weight)
        nn.init.normal_(bn.bias)
    return bn


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("make", "norm", "shape"), ROOTS)
def test_bit_equal_to_the_oracle(make: Any, norm: Any, shape: Any, bias: bool) -> None:
    root, bn = make(bias).eval(), trained_norm(norm, 6)
    ours = fold_batch_norm(root, bn)
    if isinstance(root, nn.Linear):
        theirs: Any = fuse_linear_bn_eval(root, bn)
    else:
        transposed = isinstance(root, nn.modules.conv._ConvTransposeNd)
        theirs = fuse_conv_bn_eval(root, bn, transpose=transposed)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    x = torch.randn(shape)
    torch.testing.assert_close(ours(x), bn(root(x)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_groups_of_transposed_convolutions(dimensions: int) -> None:
    """PyTorch's folding raises for them."""
    conv = getattr(nn, f"ConvTranspose{dimensions}d")(4, 6, 3, groups=2).eval()
    bn = trained_norm(getattr(nn, f"BatchNorm{dimensions}d"), 6)
    with pytest.raises(RuntimeError):
        fuse_conv_bn_eval(conv, bn, transpose=True)
    x = torch.randn(2, 4, *[5] * dimensions)
    torch.testing.assert_close(fold_batch_norm(conv, bn)(x), bn(conv(x)), atol=1e-5, rtol=1e-4)


def test_without_affine_parameters() -> None:
    conv, bn = nn.Conv2d(2, 3, 1).eval(), trained_norm(nn.BatchNorm2d, 3, affine=False)
    x = torch.randn(1, 2, 4, 4)
    torch.testing.assert_close(fold_batch_norm(conv, bn)(x), bn(conv(x)))


def test_nothing_is_changed_or_shared() -> None:
    conv, bn = nn.Conv2d(2, 3, 1).eval(), trained_norm(nn.BatchNorm2d, 3)
    conv.qconfig = "asked"
    calls: list[int] = []
    conv.register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy({**conv.state_dict(), **bn.state_dict()})
    weight = conv.weight
    folded = fold_batch_norm(conv, bn)
    folded.weight.data.zero_()
    folded.bias.data.zero_()
    folded.train()
    folded.register_buffer("new", torch.zeros(1))
    after = {**conv.state_dict(), **bn.state_dict()}
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert list(before) == list(after)
    assert conv.weight is weight and not conv.training
    assert folded.qconfig == "asked"
    folded(torch.randn(1, 2, 4, 4))
    assert calls == [1]


def test_the_new_bias_trains_when_the_weight_does() -> None:
    """PyTorch's does not, where the convolution had no bias."""
    conv, bn = nn.Conv2d(2, 3, 1, bias=False).eval(), trained_norm(nn.BatchNorm2d, 3)
    assert fold_batch_norm(conv, bn).bias.requires_grad
    conv.weight.requires_grad_(False)
    assert not fold_batch_norm(conv, bn).bias.requires_grad


def _refusals() -> list[tuple[Any, Any, str]]:
    conv = nn.Conv2d(2, 3, 1).eval()
    bn = nn.BatchNorm2d(3).eval()
    spectral = parametrizations.spectral_norm(nn.Conv2d(2, 3, 1)).eval()
    pruned = prune.l1_unstructured(nn.Conv2d(2, 3, 1).eval(), "weight", amount=1)
    return [
        (copy.deepcopy(conv).train(), bn, "only in eval mode"),
        (conv, copy.deepcopy(bn).train(), "only in eval mode"),
        (conv, nn.LayerNorm(3).eval(), "LayerNorm can be folded into Conv2d only"),
        (conv, nn.BatchNorm2d(1).eval(), "3 output channels do not fit a batch norm of 1"),
        (conv, nn.BatchNorm2d(3, track_running_stats=False).eval(), "without running statistics"),
        (spectral, bn, "a weight that is computed"),
        (pruned, bn, "a weight that is computed"),
    ]


@pytest.mark.parametrize(("root", "bn", "message"), _refusals())
def test_what_cannot_be_folded(root: nn.Module, bn: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        fold_batch_norm(root, bn)
    assert error.value.where and error.value.fix
