"""Activation functions whose range is measured, or follows from the input.

1. ReLU, ReLU6, Hardtanh and clamp cut values off: the input's qparams still hold.
2. ELU, LeakyReLU, Hardswish, GELU, SiLU and PReLU compute new values: the output is observed.

Those with a fixed range (sigmoid, tanh, …) are in ``fixed_qparams``.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.graph.export import Call
from backquant.operators.entry import filled, function_call, given
from backquant.operators.operator import INPUT, Operator, QParamsRule, Sample, Weight

MODULES: tuple[type[nn.Module], ...] = (nn.ELU, nn.LeakyReLU, nn.Hardswish)
PRELU: type[nn.Module] = nn.PReLU
FUNCTIONS: tuple[Any, ...] = (F.elu, F.hardswish, F.leaky_relu)

_aten = torch.ops.aten


def _relu(inplace: bool = False) -> nn.Module:
    return nn.ReLU(inplace)


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> nn.Module:
    return nn.LeakyReLU(negative_slope, inplace)


def _hardtanh_call(x: Any, low: float = -1.0, high: float = 1.0) -> Call:
    if (low, high) == (0.0, 6.0):
        return function_call(F.relu6, x)
    return function_call(F.hardtanh, x, low, high)


def _hardtanh_module(_: Any, low: float = -1.0, high: float = 1.0) -> nn.Module:
    return nn.ReLU6() if (low, high) == (0.0, 6.0) else nn.Hardtanh(low, high)


def _elu_call(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Call:
    if (scale, input_scale) == (1, 1):
        return function_call(F.elu, x, alpha)
    return function_call(_aten.elu.default, x, alpha, scale, input_scale)


def _gelu_module(_: Any, approximate: str = "none") -> nn.Module:
    return nn.GELU(approximate)


def _prelu_module(_: Any, weight: Any) -> nn.Module | None:
    if not given(weight):
        return None
    return filled(nn.PReLU(weight.numel(), device="meta"), weight=weight)


_OF_ONE_VALUE = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
    *("sqrt", "rsqrt", "reciprocal", "square", "abs", "neg"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("erf", "erfc", "floor", "ceil", "round", "trunc", "frac", "sign"),
)
_INVERSE = ("asin", "acos", "atan", "asinh", "acosh", "atanh")
_OTHER_NAMES = {  # exports keep them
    **{"abs": "absolute", "neg": "negative", "trunc": "fix"},
    **{name: f"arc{name[1:]}" for name in _INVERSE},
}
_SAMPLES = {  # where a function is not of every number
    **dict.fromkeys(("log", "log2", "log10", "log1p", "sqrt", "rsqrt"), Sample(low=0.1)),
    **dict.fromkeys(("asin", "acos", "atanh"), Sample(low=-0.9, high=0.9)),
    "acosh": Sample(low=1.1),
}


def _of_one_value(name: str) -> Operator:
    """A function of torch and method of one name, which every value goes through by itself."""
    names = (name, *filter(None, [_OTHER_NAMES.get(name)]))
    written = tuple(f for n in names for f in (getattr(torch, n), getattr(operator, n, None)) if f)
    return Operator(
        name=name,
        family="activation",
        sample=_SAMPLES.get(name, Sample()),
        functions=written,
        methods=tuple(each for n in names for each in (n, f"{n}_")),
        aten=(getattr(_aten, name).default,),
        respelled={
            getattr(_aten, n).default: partial(function_call, written[0]) for n in names[1:]
        },
        pole=0 if name in ("log", "log2", "log10", "rsqrt", "reciprocal") else None,
    )


def _with_settings(name: str, module: Any, function: Any, aten: Any, *settings: float) -> Operator:
    """A function of one value with numbers, which are those of its module and of its overload, too."""
    return Operator(
        name=name,
        family="activation",
        sample=Sample(module_args=settings, call=(INPUT, *settings)),
        modules=(module,) if module else (),
        functions=(function,),
        methods=() if module else (name, f"{name}_"),
        aten=(aten.default,) if aten else (),
    )


OPERATORS: tuple[Operator, ...] = (
    *map(_of_one_value, _OF_ONE_VALUE),
    _with_settings("softplus", nn.Softplus, F.softplus, _aten.softplus),
    _with_settings("selu", nn.SELU, F.selu, _aten.selu),
    _with_settings("celu", nn.CELU, F.celu, _aten.celu),
    _with_settings("mish", nn.Mish, F.mish, _aten.mish),
    _with_settings("logsigmoid", nn.LogSigmoid, F.logsigmoid, _aten.log_sigmoid),
    _with_settings("hardshrink", nn.Hardshrink, F.hardshrink, _aten.hardshrink),
    _with_settings("softshrink", nn.Softshrink, F.softshrink, _aten.softshrink),
    _with_settings("threshold", nn.Threshold, F.threshold, _aten.threshold, 0.5, 0.1),
    # exports take these two apart: there is no overload
    _with_settings("softsign", nn.Softsign, F.softsign, None),
    _with_settings("tanhshrink", nn.Tanhshrink, F.tanhshrink, None),
    _with_settings("clamp_min", None, torch.clamp_min, _aten.clamp_min, -1.0),
    _with_settings("clamp_max", None, torch.clamp_max, _aten.clamp_max, 2.0),
    Operator(
        name="relu",
        family="activation",
        homogeneous=True,
        clamps=True,
        sample=Sample(),
        modules=(nn.ReLU,),
        functions=(F.relu, torch.relu, torch.relu_),
        methods=("relu", "relu_"),
        aten=(_aten.relu.default, _aten.relu_.default),
        qparams=QParamsRule.INPUT,
        as_module=_relu,
    ),
    Operator(
        name="relu6",
        family="activation",
        clamps=True,
        sample=Sample(),
        modules=(nn.ReLU6,),
        functions=(F.relu6,),
        aten=(_aten.relu6.default,),
        qparams=QParamsRule.INPUT,
        as_module=nn.ReLU6,
    ),
    Operator(
        name="hardtanh",
        family="activation",
        clamps=True,
        sample=Sample(),
        modules=(nn.Hardtanh,),
        functions=(F.hardtanh, F.hardtanh_),
        aten=(_aten.hardtanh.default, _aten.hardtanh_.default),
        qparams=QParamsRule.INPUT,
        as_module=nn.Hardtanh,
        respelled={_aten.hardtanh.default: _hardtanh_call},
        rebuilt={_aten.hardtanh.default: _hardtanh_module},
    ),
    Operator(
        name="clamp",
        family="activation",
        clamps=True,
        sample=Sample(call=(INPUT, -1.0, 2.0)),
        functions=(torch.clamp, torch.clip),
        methods=("clamp", "clamp_", "clip", "clip_"),
        aten=(_aten.clamp.default,),
        respelled={_aten.clip.default: partial(function_call, torch.clamp)},
        qparams=QParamsRule.INPUT,
    ),
    Operator(
        name="elu",
        family="activation",
        sample=Sample(),
        modules=(nn.ELU,),
        functions=(F.elu, F.elu_),
        aten=(_aten.elu.default,),
        as_module=nn.ELU,
        respelled={_aten.elu.default: _elu_call},
    ),
    Operator(
        name="leaky_relu",
        family="activation",
        homogeneous=True,
        sample=Sample(),
        modules=(nn.LeakyReLU,),
        functions=(F.leaky_relu, F.leaky_relu_),
        aten=(_aten.leaky_relu.default, _aten.leaky_relu_.default),
        as_module=_leaky_relu,
    ),
    Operator(
        name="hardswish",
        family="activation",
        sample=Sample(),
        modules=(nn.Hardswish,),
        functions=(F.hardswish,),
        aten=(_aten.hardswish.default, _aten.hardswish_.default),
        as_module=nn.Hardswish,
    ),
    Operator(
        name="gelu",
        family="activation",
        sample=Sample(),
        modules=(nn.GELU,),
        functions=(F.gelu,),
        aten=(_aten.gelu.default,),
        rebuilt={_aten.gelu.default: _gelu_module},
    ),
    Operator(
        name="silu",
        family="activation",
        sample=Sample(),
        modules=(nn.SiLU,),
        functions=(F.silu,),
        aten=(_aten.silu.default, _aten.silu_.default),
        as_module=nn.SiLU,
    ),
    Operator(
        name="prelu",
        family="activation",
        homogeneous=True,
        sample=Sample(module_args=(4,), call=(INPUT, Weight((4,)))),
        modules=(nn.PReLU,),
        functions=(F.prelu,),
        aten=(_aten.prelu.default,),
        rebuilt={_aten.prelu.default: _prelu_module},
        weight_index=1,
    ),
)
