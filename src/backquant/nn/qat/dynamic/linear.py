"""A linear module in training for dynamic quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.qat.linear import Linear as StaticLinear


def _has_no_memory(activation: nn.Module) -> bool:
    """Whether the observer's range is that of the current batch alone, as in dynamic quantization."""
    observer = getattr(activation, "activation_post_process", activation)
    constant: object = getattr(observer, "averaging_constant", None)
    return constant == 1


class Linear(StaticLinear):
    """``qat.Linear``; its activation's observer must forget: an averaging constant of 1.

    >>> from types import SimpleNamespace
    >>> class Forgetful(nn.Identity):
    ...     averaging_constant = 1
    >>> qconfig = SimpleNamespace(weight=nn.Identity, activation=Forgetful)
    >>> Linear(3, 2, qconfig=qconfig)(torch.ones(1, 3)).shape
    torch.Size([1, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        qconfig: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, qconfig, device, dtype)
        if not _has_no_memory(qconfig.activation()):
            raise ConfigError(
                "training for dynamic quantization needs an observer without memory",
                where="qat.dynamic.Linear(..., qconfig=...)",
                fix="activation=backquant.FakeQuantize.with_args("
                "observer=backquant.MovingAverageMinMaxObserver, averaging_constant=1)",
            )
