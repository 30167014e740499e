"""Pooling: averages and maxima of neighbouring values, which stay within the input's qparams."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig, ObservationType
from backquant.operators.entry import admit
from backquant.operators.example import INPUT, Sample
from backquant.operators.operator import Operator, QParamsRule

__all__ = ["OPERATORS", "aten_entries", "root_of_item"]


def root_of_item(pattern: tuple[Any, Any, Any]) -> Any:
    """The pooling's node in ``(getitem, pool, index)``.

    >>> root_of_item(("getitem", "pool", 0))
    'pool'
    """
    return pattern[1]


def aten_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """The values (item 0) of ``aten.max_pool2d_with_indices``.

    >>> len(aten_entries([DTypeConfig()]))
    1
    """
    row = (
        BackendPatternConfig()
        ._set_pattern_complex_format(
            (operator.getitem, torch.ops.aten.max_pool2d_with_indices.default, 0)
        )
        .set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
        ._set_root_node_getter(root_of_item)
    )
    return admit([row], dtype_configs)


_aten = torch.ops.aten


def _window(dimension: int) -> Sample:
    return Sample(((2, 4, *(8,) * dimension),), module_args=(2,), call=(INPUT, (2,) * dimension))


def _adaptive(dimension: int) -> Sample:
    return Sample(((2, 4, *(8,) * dimension),), module_args=(2,), call=(INPUT, (2,) * dimension))


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="adaptive_avg_pool1d",
        family="pooling",
        sample=_adaptive(1),
        modules=(nn.AdaptiveAvgPool1d,),
        functions=(F.adaptive_avg_pool1d,),
        aten=(_aten.adaptive_avg_pool1d.default,),
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="adaptive_avg_pool2d",
        family="pooling",
        sample=_adaptive(2),
        modules=(nn.AdaptiveAvgPool2d,),
        functions=(F.adaptive_avg_pool2d,),
        aten=(_aten.adaptive_avg_pool2d.default,),
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="adaptive_avg_pool3d",
        family="pooling",
        sample=_adaptive(3),
        modules=(nn.AdaptiveAvgPool3d,),
        functions=(F.adaptive_avg_pool3d,),
        aten=(_aten.adaptive_avg_pool3d.default,),
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="avg_pool1d",
        family="pooling",
        sample=_window(1),
        modules=(nn.AvgPool1d,),
        functions=(F.avg_pool1d,),
        aten=(_aten.avg_pool1d.default,),
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="avg_pool2d",
        family="pooling",
        sample=_window(2),
        modules=(nn.AvgPool2d,),
        functions=(F.avg_pool2d,),
        aten=(_aten.avg_pool2d.default,),
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="avg_pool3d",
        family="pooling",
        sample=_window(3),
        modules=(nn.AvgPool3d,),
        functions=(F.avg_pool3d,),
        aten=(_aten.avg_pool3d.default,),
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="max_pool1d",
        family="pooling",
        sample=_window(1),
        modules=(nn.MaxPool1d,),
        functions=(F.max_pool1d, torch.max_pool1d),
        aten=(_aten.max_pool1d.default,),
        moves_values=True,
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="max_pool2d",
        family="pooling",
        sample=_window(2),
        modules=(nn.MaxPool2d,),
        functions=(F.max_pool2d, torch.max_pool2d),
        aten=(_aten.max_pool2d.default,),
        moves_values=True,
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="max_pool3d",
        family="pooling",
        sample=_window(3),
        modules=(nn.MaxPool3d,),
        functions=(F.max_pool3d, torch.max_pool3d),
        aten=(_aten.max_pool3d.default,),
        moves_values=True,
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="max_pool2d_with_indices",
        family="pooling",
        sample=_window(2),
        aten=(_aten.max_pool2d_with_indices.default,),
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="interpolate",
        family="pooling",
        sample=Sample(module_kwargs={"scale_factor": 2}, call=(INPUT, None, 2)),
        modules=(nn.Upsample,),
        functions=(F.interpolate,),
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="mean",
        family="pooling",
        sample=Sample(call=(INPUT, (2, 3))),
        functions=(torch.mean,),
        methods=("mean",),
        aten=(_aten.mean.dim,),
        qparams=QParamsRule.INPUT,
    ),
)
