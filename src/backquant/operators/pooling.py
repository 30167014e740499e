"""Pooling: averages and maxima of neighbouring values, which stay within the input's qparams."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig, ObservationType
from backquant.graph.export import Call
from backquant.operators.entry import admit, first_result, function_call, sizes
from backquant.operators.operator import INPUT, Operator, QParamsRule, Sample


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


def _pool(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    def build(_: Any, *args: Any) -> nn.Module:
        values = [sizes(v) if isinstance(v, (list, tuple)) and v else v for v in args]
        if len(values) > 1 and values[1] == []:
            values[1] = None
        return kind(*values)

    return build


def _max_pool(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    build = _pool(kind)
    # the module has ``return_indices`` before ``ceil_mode``
    return lambda x, *args: build(x, *args[:4], *((False, args[4]) if len(args) > 4 else ()))


def _upsampled(mode: str) -> Callable[..., Call]:
    def resize(x: Any, size: Any, *rest: Any) -> Call:
        *corners, factors = rest
        kwargs: dict[str, Any] = {"mode": mode}
        if corners:
            kwargs["align_corners"] = corners[0]
        return function_call(F.interpolate, x, size, factors, **kwargs)

    return resize


def _adaptive_max(dimension: int) -> Operator:
    name = f"adaptive_max_pool{dimension}d"
    return Operator(
        name=name,
        family="pooling",
        homogeneous=True,
        sample=_adaptive(dimension),
        modules=(getattr(nn, f"AdaptiveMaxPool{dimension}d"),),
        functions=(getattr(F, name),),
        decompositions=(
            first_result(getattr(_aten, name).default, lambda *args: (getattr(F, name), args)),
        ),
        moves_values=True,
        qparams=QParamsRule.INPUT,
    )


def _extreme(name: str) -> Operator:
    return Operator(
        name=name,
        family="pooling",
        sample=Sample(call=(INPUT, (2, 3))),
        functions=(getattr(torch, name),),
        methods=(name,),
        aten=(getattr(_aten, name).default,),
        moves_values=True,
        qparams=QParamsRule.INPUT,
    )


def _position(name: str) -> Operator:
    return Operator(
        name=name,
        family="pooling",
        sample=Sample(call=(INPUT, 1)),
        functions=(getattr(torch, name),),
        methods=(name,),
        aten=(getattr(_aten, name).default,),
        qparams=QParamsRule.TRUTHS,
    )


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="adaptive_avg_pool1d",
        family="pooling",
        homogeneous=True,
        sample=_adaptive(1),
        modules=(nn.AdaptiveAvgPool1d,),
        functions=(F.adaptive_avg_pool1d,),
        aten=(_aten.adaptive_avg_pool1d.default,),
        rebuilt={_aten.adaptive_avg_pool1d.default: _pool(nn.AdaptiveAvgPool1d)},
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="adaptive_avg_pool2d",
        family="pooling",
        homogeneous=True,
        sample=_adaptive(2),
        modules=(nn.AdaptiveAvgPool2d,),
        functions=(F.adaptive_avg_pool2d,),
        aten=(_aten.adaptive_avg_pool2d.default,),
        rebuilt={_aten.adaptive_avg_pool2d.default: _pool(nn.AdaptiveAvgPool2d)},
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="adaptive_avg_pool3d",
        family="pooling",
        homogeneous=True,
        sample=_adaptive(3),
        modules=(nn.AdaptiveAvgPool3d,),
        functions=(F.adaptive_avg_pool3d,),
        aten=(_aten.adaptive_avg_pool3d.default,),
        rebuilt={_aten.adaptive_avg_pool3d.default: _pool(nn.AdaptiveAvgPool3d)},
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="avg_pool1d",
        family="pooling",
        homogeneous=True,
        sample=_window(1),
        modules=(nn.AvgPool1d,),
        functions=(F.avg_pool1d,),
        aten=(_aten.avg_pool1d.default,),
        rebuilt={_aten.avg_pool1d.default: _pool(nn.AvgPool1d)},
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="avg_pool2d",
        family="pooling",
        homogeneous=True,
        sample=_window(2),
        modules=(nn.AvgPool2d,),
        functions=(F.avg_pool2d,),
        aten=(_aten.avg_pool2d.default,),
        rebuilt={_aten.avg_pool2d.default: _pool(nn.AvgPool2d)},
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="avg_pool3d",
        family="pooling",
        homogeneous=True,
        sample=_window(3),
        modules=(nn.AvgPool3d,),
        functions=(F.avg_pool3d,),
        aten=(_aten.avg_pool3d.default,),
        rebuilt={_aten.avg_pool3d.default: _pool(nn.AvgPool3d)},
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="max_pool1d",
        family="pooling",
        homogeneous=True,
        sample=_window(1),
        modules=(nn.MaxPool1d,),
        functions=(F.max_pool1d, torch.max_pool1d),
        aten=(_aten.max_pool1d.default,),
        rebuilt={_aten.max_pool1d.default: _max_pool(nn.MaxPool1d)},
        moves_values=True,
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="max_pool2d",
        family="pooling",
        homogeneous=True,
        sample=_window(2),
        modules=(nn.MaxPool2d,),
        functions=(F.max_pool2d, torch.max_pool2d),
        aten=(_aten.max_pool2d.default,),
        rebuilt={_aten.max_pool2d.default: _max_pool(nn.MaxPool2d)},
        decompositions=(
            first_result(
                _aten.max_pool2d_with_indices.default,
                lambda *args: (_aten.max_pool2d.default, args),
            ),
        ),
        moves_values=True,
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="max_pool3d",
        family="pooling",
        homogeneous=True,
        sample=_window(3),
        modules=(nn.MaxPool3d,),
        functions=(F.max_pool3d, torch.max_pool3d),
        aten=(_aten.max_pool3d.default,),
        rebuilt={_aten.max_pool3d.default: _max_pool(nn.MaxPool3d)},
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
        respelled={
            _aten.upsample_nearest1d.vec: _upsampled("nearest"),
            _aten.upsample_nearest2d.vec: _upsampled("nearest"),
            _aten.upsample_nearest3d.vec: _upsampled("nearest"),
            _aten.upsample_linear1d.vec: _upsampled("linear"),
            _aten.upsample_bilinear2d.vec: _upsampled("bilinear"),
            _aten.upsample_bicubic2d.vec: _upsampled("bicubic"),
            _aten.upsample_trilinear3d.vec: _upsampled("trilinear"),
        },
        qparams=QParamsRule.INPUT,
    ),
    *map(_adaptive_max, (1, 2, 3)),
    Operator(
        name="sum",
        family="pooling",
        sample=Sample(call=(INPUT, (2, 3))),
        functions=(torch.sum,),
        methods=("sum",),
        aten=(_aten.sum.dim_IntList,),
    ),
    *map(_extreme, ("amax", "amin")),
    *map(_position, ("argmax", "argmin")),
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
