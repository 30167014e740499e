"""Linear layers: the module, the function, and the matrix products they decompose to.

What a linear layer becomes:

1. With ReLU it is fused to ``LinearReLU``; with batch norm to ``LinearBn1d`` (folded for
   inference).
2. Some engines also fuse LeakyReLU (``LinearLeakyReLU``) and Tanh (``LinearTanh``).
3. On conversion the root ``Linear`` inside any of them becomes the reference ``Linear``.

Decomposition makes of it ``addmm`` or ``mm`` with its weight transposed, between two ``view`` for inputs of
more than two dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
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
from backquant.operators.entry import (
    AtenCall,
    Decomposition,
    admit,
    calls,
    filled,
    function_call,
    functional,
    fusion,
    given,
    is_parameter,
    is_state,
    observed,
    shape_of,
    swapped,
    with_target,
)
from backquant.operators.operator import INPUT, Operator, Sample, Weight


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
    folded = fusion((nn.Linear, nn.BatchNorm1d, nn.LeakyReLU), fused, fuse_bn_leaky_relu)
    return [
        *_with_tail((nn.LeakyReLU, F.leaky_relu), fused, dtype_configs),
        *admit([folded], dtype_configs),
    ]


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
    return _with_tail((nn.Tanh, torch.tanh), intrinsic.LinearTanh, dtype_configs)


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


def _with_tail(
    tails: tuple[Any, Any], fused: type[nn.Module], dtype_configs: Sequence[DTypeConfig]
) -> list[BackendPatternConfig]:
    """A following activation, as module and as function, behind each spelling of the layer.

    Behind the function it is no part of a dynamic kernel, which only modules become.
    """
    fuser = SequentialFuser(fused)
    static = [config for config in dtype_configs if not config.is_dynamic]
    modules = [*(fusion((nn.Linear, tail), fused, fuser) for tail in tails), _root(fused)]
    functions = [observed((F.linear, tail)) for tail in tails]
    return [*admit(modules, dtype_configs), *admit(functions, static)]


# -- what decomposition makes of a linear layer --------------------------------------------------------

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


def _transposed(value: Any) -> fx.Node | None:
    """The matrix whose transpose ``value`` is."""
    if not isinstance(value, fx.Node) or not value.args:
        return None
    source, *rest = value.args
    order: Any = rest[0] if rest and isinstance(rest[0], (list, tuple)) else rest
    swaps = {i % 2 for i in order if isinstance(i, int)} == {0, 1} and len(order) == 2
    turned = value.target is _aten.t.default or (
        value.target in (_aten.permute.default, _aten.transpose.int)
        and swaps
        and (value.target is _aten.transpose.int or order[0] % 2 == 1)
    )
    is_matrix = len(shape_of(source) or (0, 0)) == 2
    return source if turned and is_matrix and isinstance(source, fx.Node) else None


def _turned(node: fx.Node, matrix: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        weight = node.graph.call_function(_aten.t.default, (matrix,))
    weight.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    return weight


def _read_addmm(node: fx.Node) -> AtenCall | None:
    """``addmm`` with a transposed weight, or with a parameter, which is transposed here."""
    if node.kwargs:
        return None
    bias, x, matrix = node.args
    weight = _transposed(matrix)
    if weight is None and is_parameter(matrix) and is_parameter(bias):
        weight = _turned(node, matrix)
    return None if weight is None else (_aten.linear.default, (x, weight, bias))


def _read_mm(node: fx.Node) -> AtenCall | None:
    """``mm`` with a transposed weight, or with a matrix of the model, which is transposed here."""
    x, matrix = node.args
    weight = _transposed(matrix)
    if weight is None and not is_state(x) and is_state(matrix) and len(shape_of(matrix) or ()) == 2:
        weight = _turned(node, matrix)
    return None if weight is None else (_aten.linear.default, (x, weight))


def _read_bias(node: fx.Node) -> AtenCall | None:
    """A product with a matrix of the model, and the vector of the model that alone is added to it."""
    if node.kwargs:
        return None
    bias, product = with_target(node.args, _aten.linear.default)
    if product is None or len(product.args) != 2 or len(product.users) > 1 or not is_state(bias):
        return None
    is_product = calls(product.args[1], _aten.t.default) and is_state(product.args[1].args[0])
    fits = shape_of(bias) == (shape_of(product) or ())[-1:]
    return (_aten.linear.default, (*product.args, bias)) if is_product and fits else None


def _read_view(node: fx.Node) -> AtenCall | None:
    """``view(linear(view(x)))`` with the leading dimensions of ``x`` again."""
    product = node.args[0]
    if not isinstance(product, fx.Node) or product.target is not _aten.linear.default:
        return None
    flat = product.args[0]
    if not isinstance(flat, fx.Node) or flat.target not in _VIEWS or len(product.users) > 1:
        return None
    x = flat.args[0]
    shapes = [shape_of(value) for value in (x, flat, node)]
    if None in shapes:
        return None
    before, middle, after = shapes
    same = before[:-1] == after[:-1] and before[-1] == middle[-1] and len(middle) == 2  # type: ignore[index, arg-type]
    return (_aten.linear.default, (x, *product.args[1:])) if same else None


def _module(_: Any, weight: Any, bias: Any = None) -> nn.Module | None:
    if not given(weight, bias):
        return None
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    return filled(made, weight=weight, bias=bias)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="linear",
        family="linear",
        sample=Sample(((3, 8),), module_args=(8, 6), call=(INPUT, Weight((6, 8)), Weight((6,)))),
        modules=(nn.Linear,),
        functions=(F.linear,),
        aten=(_aten.linear.default,),
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
        decompositions=(
            Decomposition(_aten.addmm.default, _read_addmm, stands_for_it=True),
            Decomposition(_aten.mm.default, _read_mm, stands_for_it=True),
            Decomposition(_aten.matmul.default, _read_mm),
            Decomposition(_aten.add.Tensor, _read_bias),
            *(Decomposition(view, _read_view) for view in _VIEWS),
        ),
        rebuilt={_aten.linear.default: _module},
    ),
    Operator(
        name="addmm",
        family="linear",
        sample=Sample(((3, 8),), call=(Weight((6,)), INPUT, Weight((8, 6)))),
        functions=(torch.addmm,),
        aten=(_aten.addmm.default,),
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
        aten=(_aten.mm.default,),
        respelled={_aten.mm.default: partial(function_call, torch.matmul)},
        weight_index=1,
        weight_channel_axis=1,
    ),
)
