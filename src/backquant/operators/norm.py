"""Normalisation: batch, layer, group and instance norm.

Only batch norm has a fused form of its own (with ReLU, 2d and 3d); behind a convolution or a
linear layer it is folded, see ``conv`` and ``linear``. The weights of a norm stay in float.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig, SequentialFuser
from backquant.nn import intrinsic
from backquant.operators.entry import admit, functional, fusion, observed
from backquant.operators.example import INPUT, Sample, Weight
from backquant.operators.operator import Operator

__all__ = [
    "INSTANCE_NORMS",
    "OPERATORS",
    "batch_norm_entries",
    "functional_entries",
    "layer_norm_entries",
]

INSTANCE_NORMS: tuple[type[nn.Module], ...] = (
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_FUSED: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (nn.BatchNorm2d, intrinsic.BNReLU2d),
    (nn.BatchNorm3d, intrinsic.BNReLU3d),
)


def batch_norm_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """Batch norm that stands alone or before a ReLU, and its fused modules.

    >>> len(batch_norm_entries([DTypeConfig(torch.quint8, torch.quint8)]))
    8
    """
    rows: list[BackendPatternConfig] = []
    for norm, fused in _FUSED:
        rows += [
            fusion((norm, nn.ReLU), fused, SequentialFuser(fused)),
            fusion((norm, F.relu), fused, SequentialFuser(fused)),
            observed(norm),
        ]
    rows += [observed(fused) for _, fused in _FUSED]
    return admit(rows, dtype_configs)


def layer_norm_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """Layer norm as module and as function.

    >>> len(layer_norm_entries([DTypeConfig(torch.quint8, torch.quint8, torch.float)]))
    2
    """
    rows = [observed(nn.LayerNorm), functional(F.layer_norm, weight=2, bias=3)]
    return admit(rows, dtype_configs)


def functional_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """The functions of group and instance norm.

    >>> [e._input_type_to_index["weight"] for e in functional_entries([DTypeConfig()])]
    [2, 3]
    """
    rows = [
        functional(F.group_norm, weight=2, bias=3),
        functional(F.instance_norm, weight=3, bias=4),
    ]
    return admit(rows, dtype_configs)


_C = Weight((4,))
_STATISTIC = Weight((4,), is_buffer=True)


def _batch_norm(dimension: int, module: type[nn.Module], shape: tuple[int, ...]) -> Operator:
    fused = dict(_FUSED).get(module)
    return Operator(
        name=f"batch_norm{dimension}d",
        family="norm",
        sample=Sample((shape,), module_args=(4,)),
        modules=(module,),
        fused=() if fused is None else (fused,),
    )


OPERATORS: tuple[Operator, ...] = (
    _batch_norm(1, nn.BatchNorm1d, (2, 4, 8)),
    _batch_norm(2, nn.BatchNorm2d, (2, 4, 8, 8)),
    _batch_norm(3, nn.BatchNorm3d, (2, 4, 8, 8, 8)),
    Operator(
        name="batch_norm",
        family="norm",
        sample=Sample(
            call=(INPUT, _STATISTIC, _STATISTIC, _C, _C),
            aten=(INPUT, _C, _C, _STATISTIC, _STATISTIC, False, 0.1, 1e-5, False),
        ),
        functions=(F.batch_norm,),
        aten=(torch.ops.aten.batch_norm.default,),
        weight_index=3,
        bias_index=4,
        aten_weight_index=1,
        aten_bias_index=2,
    ),
    Operator(
        name="layer_norm",
        family="norm",
        sample=Sample(((2, 3, 4),), module_args=((4,),), call=(INPUT, (4,), _C, _C)),
        modules=(nn.LayerNorm,),
        functions=(F.layer_norm,),
        aten=(torch.ops.aten.layer_norm.default,),
        weight_index=2,
        bias_index=3,
    ),
    Operator(
        name="rms_norm",
        family="norm",
        sample=Sample(((2, 3, 4),), module_args=((4,),), call=(INPUT, (4,), _C)),
        modules=(nn.RMSNorm,),
        functions=(F.rms_norm,),
        aten=(torch.ops.aten.rms_norm.default,),
        weight_index=2,
    ),
    Operator(
        name="group_norm",
        family="norm",
        sample=Sample(module_args=(2, 4), call=(INPUT, 2, _C, _C)),
        modules=(nn.GroupNorm,),
        functions=(F.group_norm,),
        aten=(torch.ops.aten.group_norm.default,),
        weight_index=2,
        bias_index=3,
    ),
    *(
        Operator(
            name=f"instance_norm{dimension}d",
            family="norm",
            sample=Sample(((2, 4, *(8,) * dimension),), module_args=(4,)),
            modules=(module,),
        )
        for dimension, module in enumerate(INSTANCE_NORMS, start=1)
    ),
    Operator(
        name="instance_norm",
        family="norm",
        sample=Sample(
            call=(INPUT, None, None, _C, _C),
            aten=(INPUT, _C, _C, None, None, True, 0.1, 1e-5, False),
        ),
        functions=(F.instance_norm,),
        aten=(torch.ops.aten.instance_norm.default,),
        weight_index=3,
        bias_index=4,
        aten_weight_index=1,
        aten_bias_index=2,
    ),
)
