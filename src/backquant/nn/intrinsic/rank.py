"""The rank at which a batch norm normalises what the layer before it computes.

A batch norm's channels are axis 1. A linear layer's features are the last axis, a convolution's channels
the axis before its spatial ones: they are axis 1 in inputs of one rank only, and folding is wrong in others.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from backquant.errors import ConfigError, InputError
from backquant.graph.hooks import KeptHook

_ONE_RANK = (nn.BatchNorm2d, nn.BatchNorm3d)


class TakesRank(KeptHook):
    """A forward pre-hook that refuses inputs of other ranks.

    >>> import torch
    >>> linear = nn.Linear(2, 2)
    >>> handle = linear.register_forward_pre_hook(TakesRank(2))
    >>> linear(torch.zeros(3, 2)).shape
    torch.Size([3, 2])
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Raises ``InputError``."""
        if args and args[0].dim() != self.rank:
            raise InputError(
                f"a batch norm was folded into this layer for inputs of {self.rank} dimensions, got "
                f"{tuple(args[0].shape)}: there it normalises another axis",
                where=f"{type(module).__name__}, fused without example inputs",
                fix="prepare_fx(model, mapping, example_inputs) with inputs that the model accepts: it "
                "fuses what they admit",
            )


def rank_to_fold(root: nn.Module | None, norm: nn.Module | None) -> int | None:
    """The rank of inputs at which ``norm`` may be folded into ``root``; ``None``: it takes no other, or the
    two are no such pair.

    >>> rank_to_fold(nn.Linear(2, 2), nn.BatchNorm1d(2)), rank_to_fold(nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2))
    (2, 3)
    >>> rank_to_fold(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    """
    if not isinstance(norm, _BatchNorm) or isinstance(norm, _ONE_RANK):
        return None
    if isinstance(root, nn.Linear):
        return 2
    return len(root.kernel_size) + 2 if isinstance(root, _ConvNd) else None


def drop_rank_checks(module: nn.Module) -> None:
    """Remove every ``TakesRank`` inside of ``module``, whose calls have shown the ranks."""
    for part in module.modules():
        hooks = part._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, TakesRank)]:
            del hooks[key]


# What modules must fulfil before they are fused.


def require_same_mode(*modules: nn.Module) -> None:
    """Raise ``ConfigError`` when some modules are in training mode and some in eval mode."""
    if len({module.training for module in modules}) > 1:
        names = ", ".join(type(module).__name__ for module in modules)
        raise ConfigError(
            f"cannot fuse {names}: some are in training mode, some in eval mode",
            where="training flags " + ", ".join(str(module.training) for module in modules),
            fix="model.eval()  # or model.train(), on the whole model",
        )


def require_trainable(bn: nn.Module, channels: object) -> None:
    """Raise ``ConfigError`` unless fused training can follow ``bn``: its size, and that it has statistics."""
    if bn.num_features != channels:
        what = f"{channels} output channels do not fit a batch norm of {bn.num_features}"
        fix = f"{type(bn).__name__}({channels})"
    elif not bn.track_running_stats:
        what = "fused training needs a batch norm with track_running_stats=True"
        fix = f"{type(bn).__name__}({channels}, track_running_stats=True)"
    else:
        return
    raise ConfigError(what, where=f"{bn}", fix=fix)
