"""Convolutions and transposed convolutions in one, two and three dimensions.

What a convolution becomes:

1. With a following ReLU (module or ``F.relu``) it is fused to ``ConvReLUNd``.
2. With batch norm, and then perhaps ReLU, it is fused to ``ConvBnNd`` / ``ConvBnReLUNd`` for
   training; for inference the batch norm is folded into the weight.
3. On conversion the root ``ConvNd`` inside any of them becomes the reference ``ConvNd``.
4. A transposed convolution has no fused or QAT form; batch norm after it is folded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig, SequentialFuser
from backquant.nn import intrinsic, qat
from backquant.nn.intrinsic import fusers
from backquant.nn.intrinsic import qat as intrinsic_qat
from backquant.nn.quantized import reference
from backquant.operators.entry import (
    AtenCall,
    Decomposition,
    admit,
    filled,
    function_call,
    functional,
    fusion,
    given,
    observed,
    shape_of,
    sizes,
    swapped,
)
from backquant.operators.operator import INPUT, Operator, Sample, Weight


@dataclass(frozen=True)
class Conv:
    """The classes and functions of the convolution of one dimension."""

    root: type[nn.Module]
    functions: tuple[Callable[..., Any], ...]
    batch_norm: type[nn.Module]
    reference: type[nn.Module]
    qat: type[nn.Module]
    relu: type[nn.Module]
    relu_qat: type[nn.Module]
    bn: type[nn.Module]
    bn_qat: type[nn.Module]
    bn_relu: type[nn.Module]
    bn_relu_qat: type[nn.Module]


@dataclass(frozen=True)
class Transposed:
    """The classes and functions of the transposed convolution of one dimension."""

    root: type[nn.Module]
    functions: tuple[Callable[..., Any], ...]
    batch_norm: type[nn.Module]
    reference: type[nn.Module]


CONV = {
    1: Conv(
        nn.Conv1d,
        (F.conv1d,),
        nn.BatchNorm1d,
        reference.Conv1d,
        qat.Conv1d,
        intrinsic.ConvReLU1d,
        intrinsic_qat.ConvReLU1d,
        intrinsic.ConvBn1d,
        intrinsic_qat.ConvBn1d,
        intrinsic.ConvBnReLU1d,
        intrinsic_qat.ConvBnReLU1d,
    ),
    2: Conv(
        nn.Conv2d,
        (F.conv2d,),
        nn.BatchNorm2d,
        reference.Conv2d,
        qat.Conv2d,
        intrinsic.ConvReLU2d,
        intrinsic_qat.ConvReLU2d,
        intrinsic.ConvBn2d,
        intrinsic_qat.ConvBn2d,
        intrinsic.ConvBnReLU2d,
        intrinsic_qat.ConvBnReLU2d,
    ),
    3: Conv(
        nn.Conv3d,
        (F.conv3d,),
        nn.BatchNorm3d,
        reference.Conv3d,
        qat.Conv3d,
        intrinsic.ConvReLU3d,
        intrinsic_qat.ConvReLU3d,
        intrinsic.ConvBn3d,
        intrinsic_qat.ConvBn3d,
        intrinsic.ConvBnReLU3d,
        intrinsic_qat.ConvBnReLU3d,
    ),
}

TRANSPOSED = {
    1: Transposed(
        nn.ConvTranspose1d, (F.conv_transpose1d,), nn.BatchNorm1d, reference.ConvTranspose1d
    ),
    2: Transposed(
        nn.ConvTranspose2d, (F.conv_transpose2d,), nn.BatchNorm2d, reference.ConvTranspose2d
    ),
    3: Transposed(
        nn.ConvTranspose3d, (F.conv_transpose3d,), nn.BatchNorm3d, reference.ConvTranspose3d
    ),
}


#: The transposed form in every dimension, whatever its parameters.
ALL_TRANSPOSED: Mapping[int, Mapping[str, Any] | None] = {1: None, 2: None, 3: None}


def entries(
    dtype_configs: Sequence[DTypeConfig],
    transposed: Mapping[int, Mapping[str, Any] | None] = ALL_TRANSPOSED,
) -> list[BackendPatternConfig]:
    """Everything about convolutions, dimension by dimension: 19 entries each.

    ``transposed``: the dimensions in which the transposed form is taken, and which uses of it (``where``).

    >>> import torch
    >>> len(entries([DTypeConfig(torch.quint8, torch.quint8, torch.qint8)]))
    57
    """
    rows: list[BackendPatternConfig] = []
    for dimension in (1, 2, 3):
        rows += conv_entries(CONV[dimension])
        if dimension in transposed:
            found = transposed_entries(TRANSPOSED[dimension])
            rows += [entry.set_where(transposed[dimension]) for entry in found]
    return admit(rows, dtype_configs)


def conv_entries(conv: Conv) -> list[BackendPatternConfig]:
    """One dimension without its transposed form.

    >>> [len(conv_entries(CONV[d])) for d in CONV]
    [16, 16, 16]
    """
    [function] = conv.functions
    return [
        # alone
        swapped(conv.root, conv.root, conv.reference).set_qat_module(conv.qat),
        swapped(conv.qat, conv.root, conv.reference),
        functional(function, weight=1, bias=2),
        # with ReLU
        fusion((conv.root, nn.ReLU), conv.relu, SequentialFuser(conv.relu)),
        fusion((conv.root, F.relu), conv.relu, SequentialFuser(conv.relu)),
        observed(conv.relu).set_qat_module(conv.relu_qat),
        swapped(conv.relu_qat, conv.root, conv.reference),
        observed((function, nn.ReLU)),
        observed((function, F.relu)),
        # with batch norm, and then perhaps ReLU
        fusion((conv.root, conv.batch_norm), conv.bn, fusers.fuse_conv_bn),
        fusion((conv.root, conv.batch_norm, nn.ReLU), conv.bn_relu, fusers.fuse_conv_bn_relu),
        fusion(
            (conv.root, conv.batch_norm, F.relu), conv.bn_relu, fusers.fuse_conv_bn_relu
        ).set_root_module(conv.root),
        observed(conv.bn).set_qat_module(conv.bn_qat),
        observed(conv.bn_relu).set_qat_module(conv.bn_relu_qat),
        swapped(conv.bn_qat, conv.root, conv.reference),
        swapped(conv.bn_relu_qat, conv.root, conv.reference),
    ]


def transposed_entries(conv: Transposed) -> list[BackendPatternConfig]:
    """One dimension of the transposed form.

    >>> [len(transposed_entries(TRANSPOSED[d])) for d in TRANSPOSED]
    [3, 3, 3]
    """
    [function] = conv.functions
    return [
        swapped(conv.root, conv.root, conv.reference),
        swapped((conv.root, conv.batch_norm), conv.root, conv.reference).set_fuser_method(
            fusers.fuse_convtranspose_bn
        ),
        functional(function, weight=1, bias=2),
    ]


def aten_entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``aten.convolution``, alone and before a ReLU (functional or in place).

    >>> len(aten_entries([DTypeConfig()]))
    3
    """
    convolution = torch.ops.aten.convolution.default
    relus = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
    patterns: list[Any] = [convolution, *((convolution, relu) for relu in relus)]
    return admit([functional(p, weight=1, bias=2) for p in patterns], dtype_configs)


_ATEN = {
    1: torch.ops.aten.conv1d.default,
    2: torch.ops.aten.conv2d.default,
    3: torch.ops.aten.conv3d.default,
}
_ATEN_TRANSPOSED = {
    1: torch.ops.aten.conv_transpose1d.default,
    2: torch.ops.aten.conv_transpose2d.input,
    3: torch.ops.aten.conv_transpose3d.input,
}


_ATEN_PADDING = {
    1: torch.ops.aten.conv1d.padding,
    2: torch.ops.aten.conv2d.padding,
    3: torch.ops.aten.conv3d.padding,
}


def _module(
    kind: type[nn.Module], _: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> nn.Module | None:  # fmt: skip
    if not given(weight, bias):
        return None
    made = kind(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        sizes(stride),
        padding if isinstance(padding, str) else sizes(padding),
        sizes(dilation),
        groups,
        bias is not None,
        device="meta",
    )
    return filled(made, weight=weight, bias=bias)


def _transposed_module(
    kind: type[nn.Module], _: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> nn.Module | None:  # fmt: skip
    if not given(weight, bias):
        return None
    made = kind(
        weight.shape[0],
        weight.shape[1] * groups,
        tuple(weight.shape[2:]),
        sizes(stride),
        sizes(padding),
        sizes(output_padding),
        groups,
        bias is not None,
        sizes(dilation),
        device="meta",
    )
    return filled(made, weight=weight, bias=bias)


def _of_convolution(dimension: int, is_transposed: bool) -> Decomposition:
    """``convolution``, which is all of them, as the one of this dimension."""

    def read(node: fx.Node) -> AtenCall | None:
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
        if len(shape_of(weight) or ()) != dimension + 2 or transposed is not is_transposed:
            return None
        if is_transposed:
            rest: tuple[Any, ...] = (stride, padding, output_padding, groups, dilation)
            return _ATEN_TRANSPOSED[dimension], (x, weight, bias, *rest)
        return _ATEN[dimension], (x, weight, bias, stride, padding, dilation, groups)

    convolution = torch.ops.aten.convolution.default
    return Decomposition(convolution, read, stands_for_it=not is_transposed)


# what ``conv_add`` fuses to
_ADDED = {2: (intrinsic.ConvAdd2d, intrinsic.ConvAddReLU2d)}


def _conv_operator(dimension: int) -> Operator:
    conv = CONV[dimension]
    return Operator(
        name=f"conv{dimension}d",
        family="conv",
        sample=Sample(
            ((2, 4, *(8,) * dimension),),
            module_args=(4, 6, 3),
            call=(INPUT, Weight((6, 4, *(3,) * dimension)), Weight((6,))),
        ),
        modules=(conv.root,),
        functions=conv.functions,
        aten=(_ATEN[dimension],),
        weight_index=1,
        bias_index=2,
        weight_channel_axis=0,
        reference=conv.reference,
        qat=conv.qat,
        fused=(conv.relu, conv.bn, conv.bn_relu, *_ADDED.get(dimension, ())),
        fused_qat=(conv.relu_qat, conv.bn_qat, conv.bn_relu_qat),
        decompositions=(_of_convolution(dimension, False),),
        respelled={_ATEN_PADDING[dimension]: partial(function_call, conv.functions[0])},
        rebuilt=dict.fromkeys(
            (_ATEN[dimension], _ATEN_PADDING[dimension]), partial(_module, conv.root)
        ),
    )


def _transposed_operator(dimension: int) -> Operator:
    conv = TRANSPOSED[dimension]
    return Operator(
        name=f"conv_transpose{dimension}d",
        family="conv",
        sample=Sample(
            ((2, 4, *(8,) * dimension),),
            module_args=(4, 6, 3),
            call=(INPUT, Weight((4, 6, *(3,) * dimension)), Weight((6,))),
        ),
        modules=(conv.root,),
        functions=conv.functions,
        aten=(_ATEN_TRANSPOSED[dimension],),
        weight_index=1,
        bias_index=2,
        weight_channel_axis=1,
        reference=conv.reference,
        decompositions=(_of_convolution(dimension, True),),
        rebuilt={_ATEN_TRANSPOSED[dimension]: partial(_transposed_module, conv.root)},
    )


CONVOLUTION = Operator(
    name="convolution",
    family="conv",
    sample=Sample(
        ((2, 4, 8, 8),),
        call=(
            INPUT,
            Weight((6, 4, 3, 3)),
            Weight((6,)),
            (1, 1),
            (0, 0),
            (1, 1),
            False,
            (0, 0),
            1,
        ),
    ),
    aten=(torch.ops.aten.convolution.default,),
    weight_index=1,
    bias_index=2,
    # for transposed=False; with transposed=True the weight lies as in a transposed convolution
    weight_channel_axis=0,
)

OPERATORS: tuple[Operator, ...] = (
    *(_conv_operator(dimension) for dimension in CONV),
    *(_transposed_operator(dimension) for dimension in TRANSPOSED),
    CONVOLUTION,
)
