"""Linear layers: the module, the function, and the matrix products they decompose to.

What a linear layer becomes:

1. With ReLU it is fused to ``LinearReLU``; with batch norm to ``LinearBn1d`` (folded for
   inference).
2. Some engines also fuse LeakyReLU (``LinearLeakyReLU``) and Tanh (``LinearTanh``).
3. On conversion the root ``Linear`` inside any of them becomes the reference ``Linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import (
    BackendPatternConfig,
    DTypeConfig,
    SequentialFuser,
    folds_for_inference_only,
)
from backquant.errors import ConfigError
from backquant.nn import intrinsic, qat
from backquant.nn.intrinsic import fusers
from backquant.nn.intrinsic import qat as intrinsic_qat
from backquant.nn.quantized import reference
from backquant.operators.entry import admit, functional, fusion, observed, swapped
from backquant.operators.example import INPUT, Sample, Weight
from backquant.operators.operator import Operator

__all__ = [
    "OPERATORS",
    "addmm_entries",
    "aten_entries",
    "entries",
    "fuse_bn_leaky_relu",
    "leaky_relu_entries",
    "single_entries",
    "tanh_entries",
]


def single_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """The linear layer alone, in its three spellings.

    >>> [str(e.pattern).rpartition(".")[2][:6] for e in single_entries([DTypeConfig()])][:2]
    ['Linear', 'Linear']
    """
    return admit(
        [
            _root(nn.Linear).set_qat_module(qat.Linear),
            _root(qat.Linear),
            functional(F.linear, weight=1, bias=2),
        ],
        dtype_configs,
    )


def entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """The linear layer alone, with ReLU, and with batch norm.

    >>> len(entries([DTypeConfig(torch.quint8, torch.quint8, torch.qint8)]))
    12
    """
    fuse_relu = SequentialFuser(intrinsic.LinearReLU)
    return [
        *single_entries(dtype_configs),
        *admit(
            [
                fusion((nn.Linear, nn.ReLU), intrinsic.LinearReLU, fuse_relu),
                fusion((nn.Linear, F.relu), intrinsic.LinearReLU, fuse_relu),
                _root(intrinsic.LinearReLU).set_qat_module(intrinsic_qat.LinearReLU),
                _root(intrinsic_qat.LinearReLU),
                observed((F.linear, nn.ReLU)),
                observed((F.linear, F.relu)),
                fusion((nn.Linear, nn.BatchNorm1d), intrinsic.LinearBn1d, fusers.fuse_linear_bn),
                _root(intrinsic.LinearBn1d).set_qat_module(intrinsic_qat.LinearBn1d),
                _root(intrinsic_qat.LinearBn1d),
            ],
            dtype_configs,
        ),
    ]


def leaky_relu_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """Linear + LeakyReLU as one kernel, with batch norm between them folded.

    >>> len(leaky_relu_entries([DTypeConfig(torch.quint8, torch.quint8, torch.qint8)]))
    6
    """
    fused = intrinsic.LinearLeakyReLU
    rows = _with_tail((nn.LeakyReLU, F.leaky_relu), fused)
    rows.append(fusion((nn.Linear, nn.BatchNorm1d, nn.LeakyReLU), fused, fuse_bn_leaky_relu))
    return admit(rows, dtype_configs)


@folds_for_inference_only
def fuse_bn_leaky_relu(
    is_qat: bool, linear: nn.Module, bn: nn.Module, leaky_relu: nn.Module
) -> nn.Module:
    """``LinearLeakyReLU`` with the batch norm folded into its linear layer; inference only.

    Raises ``ConfigError`` for training: no module does all three there.

    >>> parts = nn.Linear(3, 2).eval(), nn.BatchNorm1d(2).eval(), nn.LeakyReLU(0.2).eval()
    >>> fuse_bn_leaky_relu(False, *parts)[1]
    LeakyReLU(negative_slope=0.2)
    """
    if is_qat:
        raise ConfigError(
            "linear + batch norm + LeakyReLU has no module for training",
            where="fuse_bn_leaky_relu(is_qat=True, ...)",
            fix="QConfigMapping().set_object_type(torch.nn.LeakyReLU, None)  "
            "# linear and batch norm are then fused by themselves",
        )
    return intrinsic.LinearLeakyReLU(fusers.fuse_linear_bn(False, linear, bn), leaky_relu)


def tanh_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """Linear + Tanh as one kernel.

    >>> len(tanh_entries([DTypeConfig(torch.quint8, torch.quint8, torch.qint8)]))
    5
    """
    rows = _with_tail((nn.Tanh, torch.tanh), intrinsic.LinearTanh)
    return admit(rows, dtype_configs)


def addmm_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``torch.addmm(bias, input, weight)`` as a linear layer.

    >>> addmm_entries([DTypeConfig()])[0]._input_type_to_index
    {'weight': 2, 'bias': 0, 'input': 1}
    """
    return admit([functional(torch.addmm, bias=0, activation=1, weight=2)], dtype_configs)


def aten_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """What ``F.linear`` decomposes to: ``addmm`` with a bias, ``mm`` without.

    >>> [str(e.pattern) for e in aten_entries([DTypeConfig()])]
    ['aten.addmm.default', 'aten.mm.default']
    """
    rows = [
        functional(torch.ops.aten.addmm.default, weight=2, bias=0),
        functional(torch.ops.aten.mm.default, weight=1),
    ]
    return admit(rows, dtype_configs)


def _root(pattern: Any) -> BackendPatternConfig:
    return swapped(pattern, nn.Linear, reference.Linear)


def _with_tail(tails: tuple[Any, Any], fused: type[nn.Module]) -> list[BackendPatternConfig]:
    """A following activation, as module and as function, behind each spelling of the layer."""
    fuser = SequentialFuser(fused)
    return [
        *(fusion((nn.Linear, tail), fused, fuser) for tail in tails),
        _root(fused),
        *(observed((F.linear, tail)) for tail in tails),
    ]


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="linear",
        family="linear",
        sample=Sample(((3, 8),), module_args=(8, 6), call=(INPUT, Weight((6, 8)), Weight((6,)))),
        modules=(nn.Linear,),
        functions=(F.linear,),
        aten=(torch.ops.aten.linear.default,),
        weight_index=1,
        bias_index=2,
        weight_channel_axis=0,
        reference=reference.Linear,
        qat=qat.Linear,
        fused=(
            intrinsic.LinearReLU,
            intrinsic.LinearBn1d,
            intrinsic.LinearLeakyReLU,
            intrinsic.LinearTanh,
        ),
        fused_qat=(intrinsic_qat.LinearReLU, intrinsic_qat.LinearBn1d),
    ),
    Operator(
        name="addmm",
        family="linear",
        sample=Sample(((3, 8),), call=(Weight((6,)), INPUT, Weight((8, 6)))),
        functions=(torch.addmm,),
        aten=(torch.ops.aten.addmm.default,),
        weight_index=2,
        bias_index=0,
        weight_channel_axis=1,
    ),
    Operator(
        name="mm",
        family="linear",
        sample=Sample(((3, 8),), call=(INPUT, Weight((8, 6)))),
        functions=(torch.mm,),
        methods=("mm",),
        aten=(torch.ops.aten.mm.default,),
        weight_index=1,
        weight_channel_axis=1,
    ),
)
