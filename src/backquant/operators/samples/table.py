"""Which operators compute each sample of a batch by itself, and by which rule.

Operators are named as their schemas are (``aten::add``), overloads alike; what is pointwise by PyTorch's own
word needs no row. What is not listed may mix samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    >>> dimension_of_samples(torch.ops.aten.sum.default, [x, None], (), 8)
    Traceback (most recent call last):
    backquant.operators.samples.rules.Mixed: aten::sum over all dimensions
    """
    name = operator._schema.name
    rule = _RULES.get(name)
    if rule is None and torch.Tag.pointwise in operator.tags:
        rule = rules.pointwise
    if rule is None:
        raise Mixed(f"{name} is not known to compute each sample by itself")
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


def draws_numbers(operator: torch._ops.OpOverload, arguments: Sequence[Any]) -> bool:
    """Whether it gives something else at each call. (Attention does with dropout only.)

    >>> draws_numbers(torch.ops.aten.rand.default, [(2,)]), draws_numbers(torch.ops.aten.relu.default, [])
    (True, False)
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    place = _DROPOUT.get(operator._schema.name)
    return place is None or arguments[place] != 0


def _table(*rows: tuple[Rule, str, str]) -> Mapping[str, Rule]:
    made: dict[str, Rule] = {}
    for rule, namespace, names in rows:
        made |= {f"{namespace}::{name}": rule for name in names.split()}
    return MappingProxyType(made)


_DROPOUT = MappingProxyType(  # the place of its probability among the arguments
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu": 3,
        "aten::scaled_dot_product_attention": 4,
    }
)
_OURS = "backquant_kernels"
_RULES = _table(
    (rules.leading(1), _OURS, "convolution averaged maxima quantized_planes"),
    (rules.leading(2), _OURS, "convolution_add gated quantized_product shuffled"),
    (rules.images, _OURS, "joined joined_rescaled"),
    (rules.rows, _OURS, "linear"),
    (rules.by_itself, _OURS, "quantized looked_up rescaled"),
    (rules.attention, _OURS, "attention attention_biased attention_biased_twice"),
    (rules.attention, "aten", "_scaled_dot_product_flash_attention_for_cpu"),
    (rules.beside(rules.leading(1), 6), "onednn", "qconv_pointwise qconv2d_pointwise"),
    (rules.beside(rules.rows, 6), "onednn", "qlinear_pointwise"),
    (rules.leading(1), "quantized", "conv1d conv2d conv3d conv1d_relu conv2d_relu conv3d_relu"),
    (rules.leading(1), "quantized", "conv_transpose1d conv_transpose2d conv_transpose3d"),
    (rules.rows, "quantized", "linear linear_relu"),
    (rules.layer_norm, "quantized", "layer_norm"),
    (
        rules.pointwise,
        "quantized",
        "add add_relu mul mul_relu hardswish sigmoid leaky_relu elu relu6",
    ),
    (rules.joined, "quantized", "cat cat_relu"),
    (rules.product, "quantized", "matmul"),
    (rules.along(1), "quantized", "softmax"),
    (rules.pointwise, "aten", "clone _to_copy copy_ dequantize quantize_per_tensor int_repr"),
    (
        rules.pointwise,
        "aten",
        "detach alias _make_per_tensor_quantized_tensor hardtanh clamp where",
    ),
    (rules.view, "aten", "view _unsafe_view"),
    (rules.expanded, "aten", "expand"),
    (rules.pointwise, "aten", "zeros_like ones_like full_like masked_fill_ _prelu_kernel"),
    (rules.pointwise, "aten", "hardswish hardswish_"),
    (rules.permuted, "aten", "permute"),
    (rules.transposed, "aten", "transpose t"),
    (rules.selected, "aten", "select unbind"),
    (rules.sliced, "aten", "slice"),
    (rules.along(2), "aten", "split split_with_sizes"),
    (rules.along(2), "aten", "roll"),
    (rules.along(1), "aten", "_softmax _safe_softmax _log_softmax flip cumsum glu"),
    (rules.reduced, "aten", "mean sum amax amin"),
    (rules.norm, "aten", "linalg_vector_norm"),
    (rules.unsqueezed, "aten", "unsqueeze"),
    (rules.squeezed, "aten", "squeeze"),
    (rules.joined, "aten", "cat"),
    (rules.stacked, "aten", "stack"),
    (rules.padded, "aten", "constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d"),
    (rules.layer_norm, "aten", "native_layer_norm"),
    (rules.batch_norm, "aten", "native_batch_norm"),
    (rules.embedded, "aten", "embedding"),
    (rules.rows, "aten", "mm"),
    (rules.added_rows, "aten", "addmm"),
    (rules.batched_product, "aten", "bmm"),
    (rules.leading(1), "aten", "convolution mkldnn_convolution native_group_norm"),
    (rules.leading(1), "aten", "avg_pool2d avg_pool3d max_pool2d_with_indices"),
    (rules.leading(1), "aten", "max_pool3d_with_indices quantized_max_pool1d quantized_max_pool2d"),
    (rules.leading(1), "aten", "_adaptive_avg_pool2d _adaptive_avg_pool3d"),
    (rules.leading(1), "aten", "upsample_nearest1d upsample_nearest2d upsample_bilinear2d"),
    (rules.leading(1), "aten", "upsample_bicubic2d"),
    (rules.restrided, "aten", "as_strided_"),
    # of parts: as they are called in inference mode
    (rules.pointwise, "aten", "contiguous to prelu"),
    (rules.view, "aten", "reshape flatten unflatten"),
    (rules.along(1), "aten", "softmax log_softmax narrow"),
    (rules.along(2), "aten", "chunk"),
    (rules.layer_norm, "aten", "layer_norm"),
    (rules.batch_norm, "aten", "batch_norm"),
    (rules.padded, "aten", "pad"),
    (rules.rows, "aten", "linear"),
    (rules.product, "aten", "matmul"),
    (rules.leading(1), "aten", "conv1d conv2d conv3d group_norm"),
    (rules.leading(1), "aten", "avg_pool1d max_pool1d max_pool2d max_pool3d"),
    (rules.leading(1), "aten", "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    (rules.attention, "aten", "scaled_dot_product_attention"),
)
_REPEATS = frozenset(f"aten::{name}" for name in ("expand", "zeros", "ones", "full"))
