"""Fuser functions: ``f(is_qat, *modules)`` gives the one module that replaces ``modules``.

In eval mode the batch norm is folded into a new convolution or linear; for quantization-aware
training the modules are put into a fused sequence as they are. ``ConfigError`` when modes differ.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config.fusers import folds_for_inference_only
from backquant.errors import ConfigError
from backquant.nn.intrinsic import fused
from backquant.nn.intrinsic.fold import fold_batch_norm
from backquant.nn.intrinsic.rank import require_same_mode, require_trainable

_CONV_BN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: fused.ConvBn1d,
    nn.Conv2d: fused.ConvBn2d,
    nn.Conv3d: fused.ConvBn3d,
}
_CONV_BN_RELU: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: fused.ConvBnReLU1d,
    nn.Conv2d: fused.ConvBnReLU2d,
    nn.Conv3d: fused.ConvBnReLU3d,
}
_CONV_RELU: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: fused.ConvReLU1d,
    nn.Conv2d: fused.ConvReLU2d,
    nn.Conv3d: fused.ConvReLU3d,
}


def _names(modules: tuple[nn.Module, ...]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _sequence(classes: dict[type[nn.Module], type[nn.Module]], *modules: nn.Module) -> nn.Module:
    cls = classes.get(type_before_parametrizations(modules[0]))
    if cls is None:
        raise ConfigError(
            f"no fused module exists for {_names(modules)}",
            where="fuser",
            fix=f"use {' or '.join('nn.' + kind.__name__ for kind in classes)}, "
            "or set_fuser_method with a fuser of your own",
        )
    return cls(*modules)


def fuse_conv_bn(is_qat: bool, conv: nn.Module, bn: nn.Module) -> nn.Module:
    """Convolution and batch norm: a new convolution in eval mode, ``ConvBnNd`` for QAT.

    >>> type(fuse_conv_bn(True, nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))).__name__
    'ConvBn2d'
    >>> type(fuse_conv_bn(False, nn.Conv2d(1, 2, 3).eval(), nn.BatchNorm2d(2).eval())).__name__
    'Conv2d'
    """
    require_same_mode(conv, bn)
    if not is_qat:
        return fold_batch_norm(conv, bn)
    require_trainable(bn, conv.out_channels)
    return _sequence(_CONV_BN, conv, bn)


def fuse_conv_bn_relu(is_qat: bool, conv: nn.Module, bn: nn.Module, relu: nn.Module) -> nn.Module:
    """Convolution, batch norm, ReLU: ``ConvReLUNd`` in eval mode, ``ConvBnReLUNd`` for QAT.

    >>> conv, bn, relu = nn.Conv2d(1, 2, 3).eval(), nn.BatchNorm2d(2).eval(), nn.ReLU().eval()
    >>> type(fuse_conv_bn_relu(False, conv, bn, relu)).__name__
    'ConvReLU2d'
    """
    require_same_mode(conv, bn, relu)
    if not is_qat:
        return _sequence(_CONV_RELU, fold_batch_norm(conv, bn), relu)
    require_trainable(bn, conv.out_channels)
    return _sequence(_CONV_BN_RELU, conv, bn, relu)


def fuse_linear_bn(is_qat: bool, linear: nn.Module, bn: nn.Module) -> nn.Module:
    """Linear and batch norm over 2-D inputs: a new linear in eval mode, ``LinearBn1d`` for QAT.

    >>> type(fuse_linear_bn(False, nn.Linear(3, 2).eval(), nn.BatchNorm1d(2).eval())).__name__
    'Linear'
    """
    require_same_mode(linear, bn)
    if not is_qat:
        return fold_batch_norm(linear, bn)
    require_trainable(bn, linear.out_features)
    return fused.LinearBn1d(linear, bn)


@folds_for_inference_only
def fuse_convtranspose_bn(is_qat: bool, convt: nn.Module, bn: nn.Module) -> nn.Module:
    """Transposed convolution and batch norm, in eval mode only: a new transposed convolution.

    >>> convt, bn = nn.ConvTranspose2d(4, 2, 3, groups=2).eval(), nn.BatchNorm2d(2).eval()
    >>> type(fuse_convtranspose_bn(False, convt, bn)).__name__
    'ConvTranspose2d'
    """
    require_same_mode(convt, bn)
    if is_qat:
        raise ConfigError(
            f"no QAT module exists for {_names((convt, bn))}",
            where="fuse_convtranspose_bn(is_qat=True, ...)",
            fix="QConfigMapping().set_object_type(torch.nn.ConvTranspose2d, None)  "
            "# keep it in float while training",
        )
    return fold_batch_norm(convt, bn)
