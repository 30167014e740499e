"""Addition, subtraction, multiplication, matrix products, maximum and minimum of two activations.

Maximum and minimum select: both inputs and the output share their qparams. The others' output is observed on
its own, beside a number, too: with qparams for both, ``x * 0.01`` would have a hundredth of the steps. (In
PyTorch's configs these share them: ``backends/pytorch.py``.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig, ObservationType
from backquant.graph.export import Call
from backquant.operators.entry import admit, function_call, observed
from backquant.operators.operator import INPUT, Operator, QParamsRule, Sample

ADD_MUL: tuple[Callable[..., Any], ...] = (operator.add, torch.add, operator.mul, torch.mul)
ADD_SUB_MUL: tuple[Callable[..., Any], ...] = (
    operator.add,
    torch.add,
    operator.sub,
    torch.sub,
    operator.mul,
    torch.mul,
)
RELUS: tuple[Any, ...] = (nn.ReLU, F.relu, torch.relu)

_BY_TENSOR_ARGUMENTS = {
    0: ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT,
    1: ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT,
    2: ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT,
}


def binary_entries(
    dtype_configs: Sequence[DTypeConfig], functions: Sequence[Callable[..., Any]] = ADD_MUL
) -> list[BackendPatternConfig]:
    """Each function followed by a ReLU in its three spellings, then alone.

    >>> len(binary_entries([DTypeConfig(torch.quint8, torch.quint8)]))
    16
    """
    patterns = [p for f in functions for p in (*((f, relu) for relu in RELUS), f)]
    return admit([by_tensor_arguments(pattern) for pattern in patterns], dtype_configs)


def by_tensor_arguments(pattern: Any) -> BackendPatternConfig:
    """``pattern``, observed by how many of its arguments are tensors.

    >>> by_tensor_arguments(torch.add)._num_tensor_args_to_observation_type[1].name
    'OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT'
    """
    return observed(pattern)._set_num_tensor_args_to_observation_type(dict(_BY_TENSOR_ARGUMENTS))


def matmul_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``torch.matmul`` of two activations.

    >>> [e.pattern.__name__ for e in matmul_entries([DTypeConfig()])]
    ['matmul']
    """
    return admit([observed(torch.matmul)], dtype_configs)


def aten_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``aten.add`` (functional and in place) before a ReLU, alone, and before an in-place ReLU.

    >>> len(aten_entries([DTypeConfig()]))
    6
    """
    relu, relu_ = torch.ops.aten.relu.default, torch.ops.aten.relu_.default
    adds = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
    patterns = [p for add in adds for p in ((add, relu), add, (add, relu_))]
    return admit([by_tensor_arguments(pattern) for pattern in patterns], dtype_configs)


_TWO = Sample(((2, 4, 8, 8), (2, 4, 8, 8)), call=(INPUT, INPUT))
_aten = torch.ops.aten


def _comparison(name: str, commutative: bool = False) -> Operator:
    packet = getattr(_aten, name)
    return Operator(
        name=name,
        family="elementwise",
        commutative=commutative,
        sample=_TWO,
        functions=(getattr(operator, name), getattr(torch, name)),
        methods=(name,),
        aten=(packet.Tensor,),
        respelled={packet.Scalar: partial(function_call, getattr(operator, name))},
        qparams=QParamsRule.TRUTHS,
    )


def _remainder(name: str, first: str, signs: Sequence[Callable[..., Any]] = ()) -> Operator:
    packet = getattr(_aten, name)
    return Operator(
        name=name,
        family="elementwise",
        sample=_TWO,
        functions=(getattr(torch, name), *signs),
        methods=(name, f"{name}_"),
        aten=(getattr(packet, first),),
        respelled={packet.Scalar: partial(function_call, getattr(torch, name))},
        pole=1,
    )


def _from_the_other(x: Any, other: Any, alpha: float = 1) -> Call:
    return function_call(torch.sub, other, x, **({} if alpha == 1 else {"alpha": alpha}))


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="add",
        family="elementwise",
        commutative=True,
        sample=_TWO,
        functions=(operator.add, torch.add, operator.iadd),
        methods=("add", "add_"),
        aten=(_aten.add.Tensor, _aten.add_.Tensor),
    ),
    Operator(
        name="sub",
        family="elementwise",
        sample=_TWO,
        functions=(operator.sub, torch.sub, operator.isub),
        methods=("sub", "sub_"),
        aten=(_aten.sub.Tensor, _aten.sub_.Tensor),
        respelled=dict.fromkeys((_aten.rsub.Tensor, _aten.rsub.Scalar), _from_the_other),
    ),
    Operator(name="rsub", family="elementwise", sample=_TWO, functions=(torch.rsub,)),
    Operator(
        name="mul",
        family="elementwise",
        commutative=True,
        sample=_TWO,
        functions=(operator.mul, torch.mul, operator.imul),
        methods=("mul", "mul_"),
        aten=(_aten.mul.Tensor, _aten.mul_.Tensor),
    ),
    Operator(
        name="div",
        family="elementwise",
        sample=_TWO,
        functions=(operator.truediv, torch.div, torch.true_divide, torch.divide),
        methods=("div", "div_", "true_divide", "true_divide_", "divide", "divide_"),
        aten=(_aten.div.Tensor, _aten.div_.Tensor),
        respelled=dict.fromkeys(
            (_aten.true_divide.Tensor, _aten.divide.Tensor),
            partial(function_call, operator.truediv),
        ),
        pole=1,
    ),
    _remainder("floor_divide", "default"),
    _remainder("remainder", "Tensor", (operator.mod,)),
    _remainder("fmod", "Tensor"),
    Operator(
        name="pow",
        family="elementwise",
        sample=Sample(call=(INPUT, 2)),
        functions=(operator.pow, torch.pow),
        methods=("pow", "pow_"),
        aten=(_aten.pow.Tensor_Scalar,),
        pole=0,
    ),
    Operator(
        name="cumsum",
        family="elementwise",
        sample=Sample(call=(INPUT, 1)),
        functions=(torch.cumsum,),
        methods=("cumsum",),
        aten=(_aten.cumsum.default,),
    ),
    *(_comparison(name) for name in ("gt", "ge", "lt", "le")),
    *(_comparison(name, commutative=True) for name in ("eq", "ne")),
    Operator(
        name="matmul",
        family="elementwise",
        sample=Sample(((2, 4, 8), (2, 8, 6)), call=(INPUT, INPUT)),
        functions=(torch.matmul, operator.matmul, torch.bmm),
        methods=("matmul", "bmm"),
        aten=(_aten.matmul.default, _aten.bmm.default),
    ),
    Operator(
        name="maximum",
        family="elementwise",
        commutative=True,
        sample=_TWO,
        functions=(torch.maximum,),
        methods=("maximum",),
        aten=(_aten.maximum.default,),
        qparams=QParamsRule.INPUTS,
    ),
    Operator(
        name="minimum",
        family="elementwise",
        commutative=True,
        sample=_TWO,
        functions=(torch.minimum,),
        methods=("minimum",),
        aten=(_aten.minimum.default,),
        qparams=QParamsRule.INPUTS,
    ),
)
