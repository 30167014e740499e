"""Convolutions in training with what follows them: batch norm, ReLU, both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import init
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from backquant.nn import qat
from backquant.nn.intrinsic import fused
from backquant.nn.intrinsic.qat.batch_norm import BatchNormAfter
from backquant.nn.intrinsic.qat.relu import ReLUAfter
from backquant.nn.qat.conv import geometry


class _ConvBnNd(BatchNormAfter, _ConvNd):
    """The state_dict is PyTorch's: ``weight``, ``bias``, ``bn.*``, ``weight_fake_quant.*``."""

    _version = 2  # the layout above is the second one in PyTorch's history
    _FLOAT_BN_MODULE: ClassVar[type[_NormBase]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool | None = None,
        padding_mode: str = "zeros",
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        freeze_bn: bool = False,
        qconfig: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        init_conv: Callable[..., None] = super().__init__  # of nn.Conv1d, nn.Conv2d or nn.Conv3d
        size = (in_channels, out_channels, kernel_size)
        init_conv(*size, stride, padding, dilation, groups, False, padding_mode, **factory)
        bn_class: Callable[..., _NormBase] = self._FLOAT_BN_MODULE
        self._attach_bn(bn_class(out_channels, eps, momentum, **factory), qconfig)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, **factory))
        self.reset_bn_parameters()
        if freeze_bn:
            self.freeze_bn_stats()

    def reset_bn_parameters(self) -> None:
        """Those of the batch norm, and the convolution's bias as ``nn.Conv2d`` initializes it."""
        super().reset_bn_parameters()
        if self.bias is not None:
            fan_in = self.weight[0].numel()
            init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def _root(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(input, weight, None)

    @classmethod
    def _arguments_of(cls, root: nn.Module) -> dict[str, Any]:
        return geometry(root)

    def to_float(self) -> nn.Module:
        """A new float convolution with the batch norm folded in, by its running statistics."""
        make: Callable[..., nn.Module] = self._ROOT
        return self._fold_into(make(**geometry(self), device="meta"))


class ConvBn1d(_ConvBnNd, nn.Conv1d):
    """Conv1d and BatchNorm1d; arguments of both, ``qconfig`` required.

    >>> from types import SimpleNamespace
    >>> qconfig = SimpleNamespace(weight=nn.Identity)
    >>> ConvBn1d(1, 2, 3, qconfig=qconfig)(torch.ones(2, 1, 4)).shape
    torch.Size([2, 2, 2])
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.ConvBn1d
    _ROOT = nn.Conv1d
    _FLOAT_BN_MODULE = nn.BatchNorm1d


class ConvBn2d(_ConvBnNd, nn.Conv2d):
    """Conv2d and BatchNorm2d; arguments of both, ``qconfig`` required.

    >>> from types import SimpleNamespace
    >>> block = fused.ConvBn2d(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    >>> block.qconfig = SimpleNamespace(weight=nn.Identity)
    >>> qat = ConvBn2d.from_float(block)
    >>> type(qat.to_float()).__name__, qat.to_float().bias.shape
    ('Conv2d', torch.Size([2]))
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.ConvBn2d
    _ROOT = nn.Conv2d
    _FLOAT_BN_MODULE = nn.BatchNorm2d


class ConvBn3d(_ConvBnNd, nn.Conv3d):
    """Conv3d and BatchNorm3d; arguments of both, ``qconfig`` required.

    >>> from types import SimpleNamespace
    >>> qconfig = SimpleNamespace(weight=nn.Identity)
    >>> ConvBn3d(1, 2, 1, qconfig=qconfig)(torch.ones(1, 1, 2, 2, 2)).shape
    torch.Size([1, 2, 2, 2, 2])
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.ConvBn3d
    _ROOT = nn.Conv3d
    _FLOAT_BN_MODULE = nn.BatchNorm3d


class ConvBnReLU1d(ReLUAfter, ConvBn1d):
    """Conv1d, BatchNorm1d and ReLU; see ``ConvBn1d``.

    >>> from types import SimpleNamespace
    >>> qconfig = SimpleNamespace(weight=nn.Identity)
    >>> bool(ConvBnReLU1d(1, 2, 3, qconfig=qconfig)(torch.rand(2, 1, 4)).min() >= 0)
    True
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.ConvBnReLU1d
    _FUSED_FLOAT_MODULE = fused.ConvReLU1d


class ConvBnReLU2d(ReLUAfter, ConvBn2d):
    """Conv2d, BatchNorm2d and ReLU; see ``ConvBn2d``.

    >>> from types import SimpleNamespace
    >>> qat = ConvBnReLU2d(1, 2, 3, qconfig=SimpleNamespace(weight=nn.Identity))
    >>> type(qat.to_float()).__name__
    'ConvReLU2d'
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.ConvBnReLU2d
    _FUSED_FLOAT_MODULE = fused.ConvReLU2d


class ConvBnReLU3d(ReLUAfter, ConvBn3d):
    """Conv3d, BatchNorm3d and ReLU; see ``ConvBn3d``.

    >>> from types import SimpleNamespace
    >>> qat = ConvBnReLU3d(1, 2, 1, qconfig=SimpleNamespace(weight=nn.Identity))
    >>> type(qat.to_float()).__name__
    'ConvReLU3d'
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.ConvBnReLU3d
    _FUSED_FLOAT_MODULE = fused.ConvReLU3d


class ConvReLU1d(ReLUAfter, qat.Conv1d):
    """Conv1d and ReLU; arguments of ``qat.Conv1d``.

    >>> from types import SimpleNamespace
    >>> qconfig = SimpleNamespace(weight=nn.Identity)
    >>> ConvReLU1d(1, 2, 3, qconfig=qconfig)(torch.ones(2, 1, 4)).shape
    torch.Size([2, 2, 2])
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.ConvReLU1d
    _FUSED_FLOAT_MODULE = fused.ConvReLU1d


class ConvReLU2d(ReLUAfter, qat.Conv2d):
    """Conv2d and ReLU; arguments of ``qat.Conv2d``.

    >>> from types import SimpleNamespace
    >>> block = fused.ConvReLU2d(nn.Conv2d(1, 2, 3), nn.ReLU())
    >>> block.qconfig = SimpleNamespace(weight=nn.Identity)
    >>> type(ConvReLU2d.from_float(block).to_float()).__name__
    'ConvReLU2d'
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.ConvReLU2d
    _FUSED_FLOAT_MODULE = fused.ConvReLU2d


class ConvReLU3d(ReLUAfter, qat.Conv3d):
    """Conv3d and ReLU; arguments of ``qat.Conv3d``.

    >>> from types import SimpleNamespace
    >>> qconfig = SimpleNamespace(weight=nn.Identity)
    >>> ConvReLU3d(1, 2, 1, qconfig=qconfig)(torch.ones(1, 1, 2, 2, 2)).shape
    torch.Size([1, 2, 2, 2, 2])
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]] = fused.ConvReLU3d
    _FUSED_FLOAT_MODULE = fused.ConvReLU3d
