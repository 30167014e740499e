"""How many multiply-adds each of PyTorch's operators does, from the shapes of its arguments.

PyTorch's own formulas (``torch.utils.flop_counter``: matrix products, convolutions, attention) count two
operations for each multiply-add. They know nothing of grouped matrix products, of matrix times vector, of
bilinear layers, of distances (a matrix product where there are many rows), and of the fused operators that
recurrent layers and attention run as on the CPU: here are those, and the commonest, for which PyTorch's take
several times as long as a small product itself. What solves or decomposes matrices, and what multiplies
sparse ones, has no such formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from backquant.graph.grouped import columns, grouped_linear

_aten = torch.ops.aten
Formula = Callable[..., int]


def _first(a: Any, *_: Any, **__: Any) -> int:
    """A matrix or vector times a vector."""
    return int(a.numel())


def _second(_: Any, a: Any, *__: Any, **___: Any) -> int:
    """The same with something added, which comes first."""
    return int(a.numel())


def _product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(a.numel()) * int(b.shape[-1])


def _added_product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
    return _product(a, b)


def _linear(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(x.numel()) * int(weight.shape[0])


def _convolution(x: Any, weight: Any, *_: Any, out: Any, **__: Any) -> int:
    """The multiply-adds of a convolution that is not transposed: each output sums one weight of its
    output channel.
    """
    del x
    return int(out.numel()) * int(math.prod(weight.shape[1:]))


def _any_convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """Transposed, each input is multiplied by one weight of its input channel."""
    del bias, stride, padding, dilation
    return _convolution(out if transposed else x, weight, out=x if transposed else out)


def _time_convolution(x: Any, weight: Any, *_: Any, out: Any, **__: Any) -> int:
    """``conv_tbc``: inputs [time, batch, in], a weight [kernel, in, out]."""
    del x
    return int(out.shape[0] * out.shape[1]) * int(weight.numel())


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """``_grouped_mm``: rows of one matrix by several matrices, or batches, or groups of columns."""
    if a.dim() == 3 and b.dim() == 3:
        return int(a.numel()) * int(b.shape[-1])
    return int(a.shape[-2]) * int(a.shape[-1]) * int(b.shape[-1])


def _grouped_rows(x: Any, weight: Any, offsets: Any, **_: Any) -> int:
    """``backquant.grouped_linear``: each row by the matrix of its group."""
    return int(x.numel()) * columns(weight, offsets)


def _distances(a: Any, *_: Any, out: Any, **__: Any) -> int:
    """``cdist``: a multiply-add for each value of each pair of rows; a [..., rows, width]."""
    return int(out.numel()) * int(a.shape[-1])


def _trilinear(a: Any, b: Any, c: Any, *expand: Any, **_: Any) -> int:
    """The product of three tensors, which are given dimensions of size 1 first."""
    sizes = []
    for tensor, dims in zip((a, b, c), expand, strict=False):
        shape = list(tensor.shape)
        for dim in dims:
            shape.insert(dim, 1)
        sizes.append(shape)
    return int(math.prod(max(each) for each in zip(*sizes, strict=True)))


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The two products of scaled dot-product attention."""
    *batch, length, width = q.shape
    return int(math.prod(batch)) * int(length) * int(k.shape[-2]) * int(width + v.shape[-1])


def _recurrent(x: Any, from_input: Any, from_hidden: Any, *_: Any, **__: Any) -> int:
    """One layer in one direction: both weights for each step of each sequence; x is [..., in]."""
    steps = int(x.numel()) // int(x.shape[-1])
    return steps * int(from_input.numel() + from_hidden.numel())


def _lengths(x: Any) -> list[int]:
    """The length of each sequence of a batch [batch, length, width], nested or not."""
    if x.is_nested:
        return [int(size[0]) for size in x._nested_tensor_size()]
    return [int(x.shape[1])] * int(x.shape[0])


def _multihead(query: Any, key: Any, value: Any, width: int, *_: Any, **__: Any) -> int:
    """``_native_multi_head_attention``: four projections of ``width``, and the attention."""
    del value
    queries, keys = _lengths(query), _lengths(key)
    projected = 2 * sum(queries) + 2 * sum(keys)
    pairs = sum(q * k for q, k in zip(queries, keys, strict=True))
    return projected * width * width + 2 * pairs * width


def _encoder_layer(x: Any, width: int, *args: Any, **_: Any) -> int:
    """``_transformer_encoder_layer_fwd``: attention, and the two linear layers behind it."""
    weights = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 2]
    first, second = weights[2:4]  # after the two weights of the attention projections
    linears = sum(_lengths(x)) * int(first.numel() + second.numel())
    return _multihead(x, x, x, width) + linears


def _two_for_each(count: Callable[..., int]) -> Formula:
    """A formula of PyTorch's, which takes shapes (or, if it is raw, the tensors) and counts twice."""

    def formula(*args: Any, out: Any, **kwargs: Any) -> int:
        return int(count(*args, **kwargs, out_val=out)) // 2

    return formula


_OWN: Mapping[Any, Formula] = {
    _aten.mv: _first,
    _aten.dot: _first,
    _aten.vdot: _first,
    _aten.addmv: _second,
    _aten.mm: _product,
    _aten.bmm: _product,
    _aten.addmm: _added_product,
    _aten.baddbmm: _added_product,
    _aten.convolution: _any_convolution,
    _aten._int_mm: _product,
    _aten.addbmm: _added_product,
    _aten._addmm_activation: _added_product,
    _aten.linear: _linear,
    _aten.mkldnn_linear: _linear,
    _aten.mkldnn_convolution: _convolution,
    _aten.conv_tbc: _time_convolution,
    _aten._grouped_mm: _grouped,
    grouped_linear.overloadpacket: _grouped_rows,
    _aten._trilinear: _trilinear,
    _aten._euclidean_dist: _distances,
    _aten._cdist_forward: _distances,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_fused_attention_overrideable: _attention,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten._native_multi_head_attention: _multihead,
    _aten._transformer_encoder_layer_fwd: _encoder_layer,
}

#: Multiply-adds by operator (its packet): called with the operator's arguments and its result ``out``.
FORMULAS: Mapping[Any, Formula] = {
    **{
        operator: _two_for_each(count)
        for operator, count in flop_registry.items()
        if isinstance(operator, torch._ops.OpOverloadPacket) and "backward" not in str(operator)
    },
    **_OWN,
}

_BEGINNINGS = (
    "linalg_",
    "_linalg_",
    "fbgemm_",
    "quantized_",
    "_weight_int",
    "_dyn_quant_matmul",
    "_sparse_",
    "_cslt_",
    "cholesky",
    "lu_",
    "_lu_",
    "slow_conv",
    "_slow_conv",
)
_NAMES = frozenset(
    {
        "_mixed_dtypes_linear",
        "_scaled_grouped_mm",
        "_spsolve",
        "_triton_multi_head_attention",
        "hspmm",
        "smm",
        "sspaddmm",
        "triangular_solve",
    }
)
_FREE = frozenset({"linalg_vector_norm", "linalg_cross", "linalg_diagonal", "_linalg_check_errors"})


def has_no_formula(operator: Any) -> bool:
    """Whether an operator of PyTorch multiplies matrices in a way that has no formula here.

    >>> has_no_formula(torch.ops.aten.linalg_inv_ex), has_no_formula(torch.ops.aten.relu)
    (True, False)
    """
    name = operator._qualified_op_name.partition("::")[2]
    return name not in _FREE and (name in _NAMES or name.startswith(_BEGINNINGS))
