"""Folding a batch norm into the operator before it.

In eval mode a batch norm is ``(y - running_mean) * factor + beta`` per channel of ``y``, with
``factor = gamma / sqrt(running_var + eps)``. Folded: ``weight * factor`` along the output channels,
and ``(bias - running_mean) * factor + beta``.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvTransposeNd

from backquant.errors import ConfigError

_Root = TypeVar("_Root", bound=nn.Module)


def _spread(factor: torch.Tensor, root: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Shape ``factor`` (one entry per output channel) so that it broadcasts over ``weight``.

    A transposed convolution's weight is ``(C_in, C_out / groups, *)``: the rows of one group meet
    the output channels of that group. PyTorch's folding raises for ``groups > 1``.
    """
    if not isinstance(root, _ConvTransposeNd):
        return factor.reshape(-1, *[1] * (weight.dim() - 1))
    per_group = factor.reshape(root.groups, -1)
    rows = per_group.repeat_interleave(weight.shape[0] // root.groups, dim=0)
    return rows.reshape(*rows.shape, *[1] * (weight.dim() - 2))


def folded_weight_and_bias(
    root: nn.Module, bn: _NormBase, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias of ``root`` with ``bn`` (its running statistics) folded in; new tensors.

    >>> bn = nn.BatchNorm1d(1, eps=0.0)
    >>> _ = bn.running_var.fill_(4.0); _ = bn.running_mean.fill_(1.0)
    >>> folded_weight_and_bias(nn.Linear(1, 1), bn, torch.tensor([[6.0]]), None)
    (tensor([[3.]]), tensor([-0.5000]))
    """
    mean, var = bn.running_mean, bn.running_var
    if mean is None or var is None:
        raise ConfigError(
            "a batch norm without running statistics cannot be folded",
            where=f"{bn}",
            fix=f"{type(bn).__name__}({bn.num_features}, track_running_stats=True)",
        )
    inverse_std = torch.rsqrt(var + bn.eps)
    gamma = torch.ones_like(mean) if bn.weight is None else bn.weight.detach()
    beta = torch.zeros_like(mean) if bn.bias is None else bn.bias.detach()
    shift = torch.zeros_like(mean) if bias is None else bias.detach()
    factor = gamma * inverse_std
    new_weight = weight.detach() * _spread(factor, root, weight)
    # Orders of operations are PyTorch's, so that the floats are equal bit for bit.
    if isinstance(root, nn.Linear):
        new_bias = (shift - mean) * factor + beta
    else:
        new_bias = (shift - mean) * inverse_std * gamma + beta
    return new_weight.to(weight.dtype), new_bias.to(weight.dtype)


def shallow_copy(module: _Root) -> _Root:
    """Another module with the same tensors, children and hooks, in tables of its own.

    >>> linear = nn.Linear(1, 1); twin = shallow_copy(linear).eval()
    >>> twin.weight is linear.weight, linear.training
    (True, True)
    """
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            vars(twin)[name] = value.copy()
    return twin


def _require_own_weight(root: nn.Module) -> None:
    if root._parameters.get("weight") is not None:
        return
    raise ConfigError(
        "a weight that is computed (by a parametrization, weight norm or pruning) cannot be folded",
        where=f"{root}",
        fix="torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')  "
        "# or remove_weight_norm, prune.remove",
    )


def fold_batch_norm(root: _Root, bn: nn.Module) -> _Root:
    """A new module like ``root`` (convolution, transposed or not, or linear) with ``bn`` in it.

    Neither module is changed: weight and bias of the result are new; attributes such as ``qconfig``
    and hooks are carried over. Raises ``ConfigError`` in training mode, on a channel count that
    does not fit, on a weight that is computed by a parametrization, without running statistics.

    >>> conv, bn = nn.Conv2d(1, 2, 3).eval(), nn.BatchNorm2d(2).eval()
    >>> x = torch.randn(1, 1, 4, 4)
    >>> torch.allclose(fold_batch_norm(conv, bn)(x), bn(conv(x)), atol=1e-6)
    True
    """
    if root.training or bn.training or not isinstance(bn, _BatchNorm):
        raise ConfigError(
            f"{type(bn).__name__} can be folded into {type(root).__name__} only in eval mode",
            where=f"training flags {root.training} and {bn.training}",
            fix="model.eval()",
        )
    _require_own_weight(root)
    weight, bias = root.weight, root.bias
    assert isinstance(weight, nn.Parameter)
    channels = root.out_features if isinstance(root, nn.Linear) else root.out_channels
    if channels != bn.num_features:
        raise ConfigError(
            f"{channels} output channels do not fit a batch norm of {bn.num_features}",
            where=f"{root} followed by {bn}",
            fix=f"{type(bn).__name__}({channels})",
        )
    folded = shallow_copy(root)
    new_weight, new_bias = folded_weight_and_bias(
        root, bn, weight, bias if isinstance(bias, torch.Tensor) else None
    )
    folded.register_parameter("weight", nn.Parameter(new_weight, weight.requires_grad))
    folded.register_parameter("bias", nn.Parameter(new_bias, weight.requires_grad))
    return folded
