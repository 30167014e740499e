"""Which operators compute each sample of a batch by itself, to the last bit, and by which rule.

An operator is listed only where the bits of a value follow from the values that it is computed from: not from
how many stand beside it, nor from where it stands. PyTorch's sums of floats and products of matrices are
ordered as sizes say; ``sigmoid``, ``silu`` or ``gelu`` round the last values of a row, which fill no vector,
otherwise than the others; oneDNN chooses its code by the whole shape. So none of them is listed, nor any
kernel on packed weights that are not ours.

Operators are named as their schemas are (``aten::add``), overloads alike. What is not listed may mix samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from backquant.operators.samples import rules
from backquant.operators.samples.rules import Held, Mixed, Rule, Size


def dimension_of_samples(
    operator: torch._ops.OpOverload, arguments: Sequence[Any], size: Size, count: int
) -> int:
    """The dimension of the results of ``operator`` that holds samples, which some argument holds. Raises
    ``Mixed``.

    ``arguments``: all by position, with a ``Held`` in place of each tensor; ``size``: of the first result.

    >>> from backquant.operators.samples import Held
    >>> add, x = torch.ops.aten.add.Tensor, Held((8, 3), 0)
    >>> dimension_of_samples(add, [x, Held((3,)), 1], (8, 3), 8)
    0
    >>> dimension_of_samples(torch.ops.aten.softmax.int, [x, 0], (8, 3), 8)
    Traceback (most recent call last):
    backquant.operators.samples.rules.Mixed: aten::softmax may give other bits in another batch
    """
    name = operator._schema.name
    rule = _RULES.get(name)
    if rule is None:
        raise Mixed(f"{name} may give other bits in another batch")
    try:
        return rule(arguments, size, count)
    except Mixed as problem:
        raise Mixed(f"{name} {problem}") from None


def repeated(
    operator: torch._ops.OpOverload, arguments: Sequence[Any], size: Size, count: int
) -> int | None:
    """The dimension along which a result of this size holds the same for each of ``count`` samples, of an
    operator that reads no samples; ``None``: there is not one such dimension.

    >>> from backquant.operators.samples import Held
    >>> expand = torch.ops.aten.expand.default
    >>> [repeated(expand, [Held((rows, 1))], (8, 3), 8) for rows in (1, 8)]
    [0, None]
    """
    found = [dim for dim, length in enumerate(size) if length == count]
    if operator._schema.name not in _REPEATS or len(found) != 1:
        return None
    last = found[0] - len(size)
    read = [value for value in arguments if isinstance(value, Held)]
    alike = all(len(each.size) < -last or each.size[last] == 1 for each in read)
    return found[0] if alike else None


def check_numbers(
    operator: torch._ops.OpOverload, read: Iterable[torch.dtype], made: Iterable[torch.dtype]
) -> None:
    """Raise ``Mixed`` unless the operator is listed, and for numbers of these dtypes.

    >>> check_numbers(torch.ops.aten.mul.Tensor, [torch.float32], [torch.float32])
    >>> check_numbers(torch.ops.aten.mul.Tensor, [torch.float16], [torch.float16])
    Traceback (most recent call last):
    backquant.operators.samples.rules.Mixed: aten::mul of torch.float16
    """
    name, read, made = operator._schema.name, set(read), set(made)
    if not read and (name in _FROM_NOTHING or not any(d.is_floating_point for d in made)):
        return
    if name not in _RULES:
        raise Mixed(f"{name} may give other bits in another batch")
    known = _NUMBERS | _QUANTIZED if name in _ON_QUANTIZED else _NUMBERS
    for dtype in (read | made) - known:
        raise Mixed(f"{name} of {dtype}")
    to_integers = not any(dtype.is_floating_point for dtype in made)
    if name in _CONVERTS and to_integers and any(dtype.is_floating_point for dtype in read):
        raise Mixed(f"{name} from floats to integers, which may be beyond them")


def _table(*rows: tuple[Rule, str, str]) -> Mapping[str, Rule]:
    made: dict[str, Rule] = {}
    for rule, namespace, names in rows:
        made |= {f"{namespace}::{name}": rule for name in names.split()}
    return MappingProxyType(made)


_OURS = "backquant_kernels"
#: Each row says why a value has the same bits wherever it stands and whatever stands beside it.
_RULES = _table(
    # Ours: exact sums of integers, or of floats in an order of each row; a vector that is not full takes
    # the same instructions as one that is.
    (rules.leading(1), _OURS, "convolution averaged maxima"),
    (rules.leading(2), _OURS, "convolution_add gated shuffled"),
    (rules.rows, _OURS, "linear"),
    (rules.by_itself, _OURS, "quantized looked_up rescaled"),
    (rules.attention, _OURS, "attention attention_biased attention_biased_twice"),
    # Values are moved, or selected.
    (rules.pointwise, "aten", "clone detach alias contiguous _to_copy to copy_ int_repr where"),
    (rules.pointwise, "aten", "zeros_like ones_like full_like masked_fill masked_fill_"),
    (rules.pointwise, "aten", "_make_per_tensor_quantized_tensor"),
    (rules.view, "aten", "view _unsafe_view reshape flatten unflatten"),
    (rules.expanded, "aten", "expand"),
    (rules.permuted, "aten", "permute"),
    (rules.transposed, "aten", "transpose t"),
    (rules.selected, "aten", "select unbind"),
    (rules.sliced, "aten", "slice"),
    (rules.along(1), "aten", "flip narrow"),
    (rules.along(2), "aten", "split split_with_sizes chunk roll"),
    (rules.unsqueezed, "aten", "unsqueeze"),
    (rules.squeezed, "aten", "squeeze"),
    (rules.joined, "aten", "cat"),
    (rules.stacked, "aten", "stack"),
    (
        rules.padded,
        "aten",
        "constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d pad",
    ),
    (rules.embedded, "aten", "embedding"),
    (rules.leading(1), "aten", "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices"),
    (rules.leading(1), "aten", "max_pool3d_with_indices quantized_max_pool1d quantized_max_pool2d"),
    (rules.leading(1), "aten", "upsample_nearest1d upsample_nearest2d"),
    (rules.restrided, "aten", "as_strided_"),
    # Operations that IEEE 754 rounds, one after the other: none is joined with another, as in a * b + c.
    (rules.pointwise, "aten", "mul mul_ abs abs_ neg neg_ sqrt sqrt_ rsqrt reciprocal"),
    (rules.pointwise, "aten", "ceil floor round trunc sign eq ne lt le gt ge"),
    (
        rules.pointwise,
        "aten",
        "logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not",
    ),
    (rules.pointwise, "aten", "relu relu_ clamp clamp_ clamp_min clamp_min_ hardtanh hardtanh_"),
    (
        rules.pointwise,
        "aten",
        "hardswish hardswish_ hardsigmoid hardsigmoid_ leaky_relu leaky_relu_",
    ),
    (rules.pointwise, "aten", "prelu _prelu_kernel dequantize quantize_per_tensor"),
    (rules.plainly(2, 1), "aten", "add add_ sub sub_"),
    (rules.plainly(2, None), "aten", "div div_"),
)
_NUMBERS = frozenset(
    {
        *(torch.float32, torch.float64, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32})
#: What takes quantized tensors, or gives them; others dequantize the end of a row otherwise than its vectors.
_ON_QUANTIZED = frozenset(
    f"aten::{name}"
    for name in (
        *("_make_per_tensor_quantized_tensor", "quantize_per_tensor", "dequantize", "int_repr"),
        *("quantized_max_pool1d", "quantized_max_pool2d", "view", "_unsafe_view", "permute"),
        *("transpose", "unsqueeze", "squeeze", "as_strided_"),
    )
)
_CONVERTS = frozenset({"aten::_to_copy", "aten::to", "aten::copy_"})
_FROM_NOTHING = frozenset(
    f"aten::{name}"
    for name in ("zeros", "ones", "full", "scalar_tensor", "empty", "_empty_affine_quantized")
)
_REPEATS = frozenset(f"aten::{name}" for name in ("expand", "zeros", "ones", "full"))
