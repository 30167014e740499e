"""Linear modules in training with what follows them: batch norm, ReLU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from backquant.errors import InputError
from backquant.nn import qat
from backquant.nn.intrinsic import fused
from backquant.nn.intrinsic.qat.batch_norm import BatchNormAfter
from backquant.nn.intrinsic.qat.relu import ReLUAfter
from backquant.nn.qat.linear import linear_arguments


class LinearReLU(ReLUAfter, qat.Linear):
    """Linear and ReLU; arguments of ``qat.Linear``.

    >>> from types import SimpleNamespace
    >>> block = fused.LinearReLU(nn.Linear(3, 2), nn.ReLU())
    >>> block.qconfig = SimpleNamespace(weight=nn.Identity)
    >>> type(LinearReLU.from_float(block).to_float()).__name__
    'LinearReLU'
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.LinearReLU
    _FUSED_FLOAT_MODULE = fused.LinearReLU


class LinearBn1d(BatchNormAfter, nn.Linear):
    """Linear and BatchNorm1d over inputs ``(N, in_features)``; arguments of both.

    Inputs of three dimensions are refused: there the batch norm's channels are axis 1, the linear's
    are the last, and folding one into the other, as PyTorch does, changes the model.

    >>> from types import SimpleNamespace
    >>> qat_module = LinearBn1d(3, 2, qconfig=SimpleNamespace(weight=nn.Identity))
    >>> qat_module(torch.rand(4, 3)).shape, type(qat_module.to_float()).__name__
    (torch.Size([4, 2]), 'Linear')
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.LinearBn1d

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        freeze_bn: bool = False,
        qconfig: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        bn = nn.BatchNorm1d(out_features, eps, momentum, device=device, dtype=dtype)
        self._attach_bn(bn, qconfig)
        self.reset_bn_parameters()
        if freeze_bn:
            self.freeze_bn_stats()

    def _root(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if input.dim() != 2:
            raise InputError(
                f"LinearBn1d takes inputs (N, {self.in_features}), got {tuple(input.shape)}",
                where="backquant.nn.intrinsic.qat.LinearBn1d.forward",
                fix="keep this batch norm unfused: "
                "QConfigMapping().set_module_name('<its name>', None)",
            )
        return F.linear(input, weight)

    @classmethod
    def _arguments_of(cls, root: nn.Module) -> dict[str, Any]:
        return linear_arguments(root)

    def to_float(self) -> nn.Module:
        """A new linear with the batch norm folded in, by its running statistics."""
        return self._fold_into(nn.Linear(self.in_features, self.out_features, device="meta"))
