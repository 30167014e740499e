"""Normalisation: batch, layer, group and instance norm.

Only batch norm has a fused form of its own (with ReLU, 2d and 3d); behind a convolution or a
linear layer it is folded, see ``conv`` and ``linear``. The weights of a norm stay in float.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig, SequentialFuser
from backquant.graph.export import Call
from backquant.nn import intrinsic
from backquant.operators.entry import (
    AtenCall,
    Decomposition,
    admit,
    calls,
    filled,
    first_result,
    function_call,
    functional,
    fusion,
    given,
    is_parameter,
    observed,
    shape_of,
    with_target,
)
from backquant.operators.operator import INPUT, Operator, Sample, Weight

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


_aten = torch.ops.aten
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


# -- what decomposition makes of them ------------------------------------------------------------------


def _read_batch_norm(*args: Any) -> AtenCall:
    x, weight, bias, mean, var, momentum, eps = args
    return _aten.batch_norm.default, (x, weight, bias, mean, var, False, momentum, eps, False)


def _read_layer_norm(*args: Any) -> AtenCall:
    return _aten.layer_norm.default, args


def _read_group_norm(*args: Any) -> AtenCall:
    x, weight, bias, _, _, _, groups, eps = args
    return _aten.group_norm.default, (x, groups, weight, bias, eps)


def _read_rms_norm(node: fx.Node) -> AtenCall | None:
    """``weight * (x * rsqrt(mean(x ** 2) + eps))``, as models write it that have no module for it."""
    weight, scaled = with_target(node.args, _aten.mul.Tensor)
    if scaled is None or not is_parameter(weight) or len(shape_of(weight) or ()) != 1:
        return None
    x, root = with_target(scaled.args, _aten.rsqrt.default)
    added: Any = root.args[0] if root is not None else None
    if not calls(added, _aten.add.Tensor) or not isinstance(added.args[1], float):
        return None
    mean: Any = added.args[0]
    if not calls(mean, _aten.mean.dim) or tuple(mean.args[1:]) != ([-1], True):
        return None
    power: Any = mean.args[0]
    if not calls(power, _aten.pow.Tensor_Scalar) or power.args != (x, 2):
        return None
    inner = (scaled, root, added, mean, power)
    if any(len(part.users) > 1 for part in inner) or shape_of(x) is None:
        return None
    eps = added.args[1]
    return _aten.rms_norm.default, (x, list(shape_of(weight) or ()), weight, eps)


# -- how exported graphs read --------------------------------------------------------------------------


def _batch_norm_call(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float,
    _: bool = False,
) -> Call:  # fmt: skip
    return function_call(F.batch_norm, x, mean, var, weight, bias, training, momentum, eps)


def _instance_norm_call(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, use_input: bool, momentum: float, eps: float,
    _: bool = False,
) -> Call:  # fmt: skip
    return function_call(F.instance_norm, x, mean, var, weight, bias, use_input, momentum, eps)


def _layer_norm_call(x: Any, shape: Any, *rest: Any, **_: Any) -> Call:
    weight, bias, eps = (*rest, None, None, None)[:3]
    kwargs = {} if eps is None else {"eps": eps}
    return function_call(F.layer_norm, x, tuple(shape), weight, bias, **kwargs)


def _rms_norm_call(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Call:
    return function_call(F.rms_norm, x, tuple(shape), weight, eps)


def _group_norm_call(x: Any, groups: int, *rest: Any, **_: Any) -> Call:
    weight, bias, eps = (*rest, None, None, None)[:3]
    kwargs = {} if eps is None else {"eps": eps}
    return function_call(F.group_norm, x, groups, weight, bias, **kwargs)


_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _batch_norm_module(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float,
    _: bool = False,
) -> nn.Module | None:  # fmt: skip
    value = getattr(x, "meta", {}).get("val")
    kind = _BATCH_NORMS.get(value.dim()) if isinstance(value, torch.Tensor) else None
    if training or kind is None or mean is None or not given(weight, bias, mean, var):
        return None
    made = kind(mean.shape[0], eps, momentum, weight is not None, device="meta")
    made.running_mean, made.running_var = mean, var
    made.num_batches_tracked = torch.tensor(0)
    return filled(made, weight=weight, bias=bias)


def _layer_norm_module(
    _: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *__: Any
) -> nn.Module | None:
    if not given(weight, bias):
        return None
    made = nn.LayerNorm(tuple(shape), eps, weight is not None, bias is not None, device="meta")
    return filled(made, weight=weight, bias=bias)


def _rms_norm_module(
    _: Any, shape: Any, weight: Any = None, eps: float | None = None
) -> nn.Module | None:
    if not given(weight):
        return None
    made = nn.RMSNorm(tuple(shape), eps, weight is not None, device="meta")
    return filled(made, weight=weight)


def _group_norm_module(
    _: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *__: Any
) -> nn.Module | None:
    if weight is None or bias is None or not given(weight, bias):
        return None
    made = nn.GroupNorm(groups, weight.shape[0], eps, device="meta")
    return filled(made, weight=weight, bias=bias)


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
        aten=(_aten.batch_norm.default,),
        decompositions=(
            first_result(_aten._native_batch_norm_legit_no_training.default, _read_batch_norm),
        ),
        respelled={_aten.batch_norm.default: _batch_norm_call},
        rebuilt={_aten.batch_norm.default: _batch_norm_module},
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
        aten=(_aten.layer_norm.default,),
        decompositions=(first_result(_aten.native_layer_norm.default, _read_layer_norm),),
        respelled={_aten.layer_norm.default: _layer_norm_call},
        rebuilt={_aten.layer_norm.default: _layer_norm_module},
        weight_index=2,
        bias_index=3,
    ),
    Operator(
        name="rms_norm",
        family="norm",
        sample=Sample(((2, 3, 4),), module_args=((4,),), call=(INPUT, (4,), _C)),
        modules=(nn.RMSNorm,),
        functions=(F.rms_norm,),
        aten=(_aten.rms_norm.default,),
        decompositions=(Decomposition(_aten.mul.Tensor, _read_rms_norm),),
        respelled={_aten.rms_norm.default: _rms_norm_call},
        rebuilt={_aten.rms_norm.default: _rms_norm_module},
        weight_index=2,
    ),
    Operator(
        name="group_norm",
        family="norm",
        sample=Sample(module_args=(2, 4), call=(INPUT, 2, _C, _C)),
        modules=(nn.GroupNorm,),
        functions=(F.group_norm,),
        aten=(_aten.group_norm.default,),
        decompositions=(first_result(_aten.native_group_norm.default, _read_group_norm),),
        respelled={_aten.group_norm.default: _group_norm_call},
        rebuilt={_aten.group_norm.default: _group_norm_module},
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
        aten=(_aten.instance_norm.default,),
        respelled={_aten.instance_norm.default: _instance_norm_call},
        weight_index=3,
        bias_index=4,
        aten_weight_index=1,
        aten_bias_index=2,
    ),
)
