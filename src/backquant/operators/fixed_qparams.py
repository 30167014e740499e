"""Operators whose output range is known: sigmoid, hardsigmoid, softmax in [0, 1], tanh in [-1, 1].

For 8-bit unsigned activations the scale and zero point are therefore constraints of the entry,
not measurements; other dtypes of the same entry stay unconstrained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.errors import SpecError
from backquant.graph.export import Call
from backquant.operators.entry import AtenCall, Decomposition, admit, function_call, observed
from backquant.operators.operator import INPUT, FixedQParams, Operator, QParamsRule, Sample

ZERO_TO_ONE = FixedQParams(scale=1.0 / 256.0, zero_point=0)
MINUS_ONE_TO_ONE = FixedQParams(scale=2.0 / 256.0, zero_point=128)
DTYPE = torch.quint8

PATTERNS: tuple[tuple[Any, FixedQParams], ...] = (
    (nn.Hardsigmoid, ZERO_TO_ONE),
    (F.hardsigmoid, ZERO_TO_ONE),
    ("hardsigmoid", ZERO_TO_ONE),
    ("hardsigmoid_", ZERO_TO_ONE),
    (nn.Sigmoid, ZERO_TO_ONE),
    (torch.sigmoid, ZERO_TO_ONE),
    ("sigmoid", ZERO_TO_ONE),
    ("sigmoid_", ZERO_TO_ONE),
    (nn.Softmax, ZERO_TO_ONE),
    (nn.Tanh, MINUS_ONE_TO_ONE),
    (torch.tanh, MINUS_ONE_TO_ONE),
    ("tanh", MINUS_ONE_TO_ONE),
    ("tanh_", MINUS_ONE_TO_ONE),
)


def entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """Every spelling, with its scale and zero point fixed where activations are ``quint8``.

    >>> e = entries([DTypeConfig(torch.quint8, torch.quint8)])[0]
    >>> e.dtype_configs[0].output_dtype_with_constraints.scale_exact_match
    0.00390625
    """
    return [
        entry
        for pattern, fixed in PATTERNS
        for entry in admit([observed(pattern)], [constrain(c, fixed) for c in dtype_configs])
    ]


def constrain(config: DTypeConfig, fixed: FixedQParams) -> DTypeConfig:
    """A copy of ``config`` whose ``quint8`` activations must have the qparams of ``fixed``.

    Raises ``SpecError`` if such an activation already bounds its scale: both cannot hold.

    >>> constrain(DTypeConfig(torch.qint8), ZERO_TO_ONE) == DTypeConfig(torch.qint8)
    True
    """
    result = config.copy()
    for activation in (result.input_dtype_with_constraints, result.output_dtype_with_constraints):
        if activation.dtype is not DTYPE:
            continue
        bounds = (activation.scale_min_lower_bound, activation.scale_max_upper_bound)
        if bounds != (None, None):
            raise SpecError(
                "an operator with fixed qparams cannot also bound its scale",
                where=f"{activation!r}",
                fix="give fixed-qparams operators a DTypeConfig without scale bounds",
            )
        activation.quant_min_lower_bound = fixed.quant_min
        activation.quant_max_upper_bound = fixed.quant_max
        activation.scale_exact_match = fixed.scale
        activation.zero_point_exact_match = fixed.zero_point
    return result


_aten = torch.ops.aten


def _read_softmax(node: fx.Node) -> AtenCall | None:
    x, dim, to_float = node.args
    return None if to_float else (_aten.softmax.int, (x, dim))


def _softmax_call(x: Any, dim: int, dtype: Any = None) -> Call:
    return function_call(F.softmax, x, dim, **({} if dtype is None else {"dtype": dtype}))


def _log_softmax_call(x: Any, dim: int, dtype: Any = None) -> Call:
    return function_call(F.log_softmax, x, dim, **({} if dtype is None else {"dtype": dtype}))


def _softmax_module(_: Any, dim: int, dtype: Any = None) -> nn.Module | None:
    return nn.Softmax(dim) if dtype is None else None


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="hardsigmoid",
        family="fixed_qparams",
        sample=Sample(),
        modules=(nn.Hardsigmoid,),
        functions=(F.hardsigmoid,),
        # PATTERNS lists two methods of this name; a tensor has neither, so no graph shows them
        aten=(_aten.hardsigmoid.default, _aten.hardsigmoid_.default),
        qparams=QParamsRule.FIXED,
        fixed=ZERO_TO_ONE,
        as_module=nn.Hardsigmoid,
    ),
    Operator(
        name="sigmoid",
        family="fixed_qparams",
        sample=Sample(),
        modules=(nn.Sigmoid,),
        functions=(torch.sigmoid,),  # F.sigmoid(x) calls x.sigmoid(), F.tanh(x) x.tanh()
        methods=("sigmoid", "sigmoid_"),
        aten=(_aten.sigmoid.default, _aten.sigmoid_.default),
        qparams=QParamsRule.FIXED,
        fixed=ZERO_TO_ONE,
        as_module=nn.Sigmoid,
    ),
    Operator(
        name="softmax",
        family="fixed_qparams",
        sample=Sample(((2, 5),), module_args=(-1,), call=(INPUT, -1)),
        modules=(nn.Softmax,),
        functions=(F.softmax, torch.softmax),
        methods=("softmax",),
        aten=(_aten.softmax.int,),
        decompositions=(Decomposition(_aten._softmax.default, _read_softmax),),
        respelled={_aten.softmax.int: _softmax_call},
        rebuilt={_aten.softmax.int: _softmax_module},
        qparams=QParamsRule.FIXED,
        fixed=ZERO_TO_ONE,
    ),
    Operator(
        name="log_softmax",
        family="fixed_qparams",
        sample=Sample(((2, 5),), module_args=(-1,), call=(INPUT, -1)),
        modules=(nn.LogSoftmax,),
        functions=(F.log_softmax, torch.log_softmax),
        methods=("log_softmax",),
        aten=(_aten.log_softmax.int,),
        respelled={_aten.log_softmax.int: _log_softmax_call},
    ),
    Operator(
        name="tanh",
        family="fixed_qparams",
        sample=Sample(),
        modules=(nn.Tanh,),
        functions=(torch.tanh,),
        methods=("tanh", "tanh_"),
        aten=(_aten.tanh.default, _aten.tanh_.default),
        qparams=QParamsRule.FIXED,
        fixed=MINUS_ONE_TO_ONE,
        as_module=nn.Tanh,
    ),
)
