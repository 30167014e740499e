"""Which dimension of a result holds the samples of a batch, of operators that compute each sample by itself.

A batch of N samples stands along one dimension of a tensor: N blocks in turn, which may be one row each or,
where a view has merged it with what stood behind, several (windows of an image, heads of attention). An
operator keeps samples apart if block s of its result is what it gives for blocks s of its arguments. Of the
operators in the tables here that is known, if its rule finds a dimension; what is in no table may mix
samples.

Operators are named as their schemas are (``aten::add``), overloads alike. Arguments stand by position, all of
them, with a ``Held`` in place of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

Size = tuple[int, ...]


class Mixed(Exception):  # noqa: N818 - a reason, no error of the user's
    """Why an operator may mix samples. Internal."""


class Held(NamedTuple):
    """A tensor: its size, and the dimension that holds samples; ``None``: it is the same for all of them."""

    size: Size
    samples: int | None = None


#: The dimension of the results, from the arguments, the size of the first result and the number of samples.
Rule = Callable[[Sequence[Any], Size, int], int]


def dimension_of_samples(
    operator: torch._ops.OpOverload, arguments: Sequence[Any], size: Size, count: int
) -> int:
    """The dimension of the results of ``operator`` that holds samples, which some argument holds. ``size``:
    of the first result. Raises ``Mixed``.

    >>> add, x = torch.ops.aten.add.Tensor, Held((8, 3), 0)
    >>> dimension_of_samples(add, [x, Held((3,)), 1], (8, 3), 8)
    0
    >>> dimension_of_samples(torch.ops.aten.sum.default, [x, None], (), 8)
    Traceback (most recent call last):
    backquant.operators.samples.Mixed: aten::sum over all dimensions
    """
    name = operator._schema.name
    rule = _RULES.get(name)
    if rule is None and torch.Tag.pointwise in operator.tags:
        rule = _pointwise
    if rule is None:
        raise Mixed(f"{name} is not known to compute each sample by itself")
    try:
        return rule(arguments, size, count)
    except Mixed as problem:
        raise Mixed(f"{name} {problem}") from None


def repeated(operator: torch._ops.OpOverload, size: Size, count: int) -> int | None:
    """The dimension along which a result of this size holds the same for each of ``count`` samples, of an
    operator that reads no samples; ``None``: there is not one such dimension.

    >>> repeated(torch.ops.aten.expand.default, (8, 1, 3), 8)
    0
    """
    found = [dim for dim, length in enumerate(size) if length == count]
    return found[0] if operator._schema.name in _REPEATS and len(found) == 1 else None


def draws_numbers(operator: torch._ops.OpOverload, arguments: Sequence[Any]) -> bool:
    """Whether it gives something else at each call. (Attention does with dropout only.)

    >>> draws_numbers(torch.ops.aten.rand.default, [(2,)]), draws_numbers(torch.ops.aten.relu.default, [])
    (True, False)
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    place = _DROPOUT.get(operator._schema.name)
    return place is None or arguments[place] != 0


def _first(arguments: Sequence[Any]) -> tuple[Held, int]:
    """The input, and the dimension of its samples."""
    found: Held = arguments[0]
    if found.samples is None:
        raise Mixed("with samples in another place than its input")
    return found, found.samples


def _holding(arguments: Sequence[Any]) -> list[Held]:
    """All tensors; lists of them, too."""
    found = tree_leaves(list(arguments), is_leaf=lambda value: isinstance(value, Held))
    return [value for value in found if isinstance(value, Held)]


def _other_than(held: Held, dims: Iterable[int], what: str) -> None:
    if held.samples in {dim % len(held.size) for dim in dims}:
        raise Mixed(what)


def _listed(dims: int | Sequence[int]) -> Sequence[int]:
    return (dims,) if isinstance(dims, int) else dims


def _pointwise(arguments: Sequence[Any], *_: Any) -> int:
    tensors = _holding(arguments)
    rank = max(len(held.size) for held in tensors)
    found = {held.samples - len(held.size) for held in tensors if held.samples is not None}
    if len(found) != 1:
        raise Mixed("with samples along different dimensions")
    (last,) = found
    for held in tensors:
        if held.samples is None and len(held.size) >= -last and held.size[last] != 1:
            raise Mixed("with something else for each sample")
    return rank + last


def _leading(count: int) -> Rule:
    """The first ``count`` tensors hold samples along their first dimension, or are the same for all; the
    others are the same for all."""

    def rule(arguments: Sequence[Any], *_: Any) -> int:
        tensors = _holding(arguments)
        if {held.samples for held in tensors[:count]} - {None} != {0}:
            raise Mixed("with samples along another dimension than the first")
        if any(held.samples is not None for held in tensors[count:]):
            raise Mixed("with weights of each sample's own")
        if any(held.samples is None and held.size[:1] != (1,) for held in tensors[:count]):
            raise Mixed("with something else for each sample")
        return 0

    return rule


def _rows(arguments: Sequence[Any], *_: Any) -> int:
    """Linear layers: each row by itself."""
    x, *others = _holding(arguments)
    if x.samples is None or any(held.samples is not None for held in others):
        raise Mixed("with weights of each sample's own")
    _other_than(x, (-1,), "over samples")
    return x.samples


def _added_rows(arguments: Sequence[Any], *_: Any) -> int:
    bias, *product = arguments
    if bias.samples is not None or len(bias.size) > 1:
        raise Mixed("with a bias of each sample's own")
    return _rows(product)


def _batched_product(arguments: Sequence[Any], *_: Any) -> int:
    one, other = arguments[:2]
    if {one.samples, other.samples} == {0}:
        return 0
    if one.samples == 1 and other.samples is None:
        return 1
    raise Mixed("over samples")


def _product(arguments: Sequence[Any], *_: Any) -> int:
    one, other = arguments
    if other.samples is None and len(other.size) == 2:
        return _rows(arguments)
    if len(one.size) < 3 or one.samples != other.samples or len(one.size) != len(other.size):
        raise Mixed("of what holds samples along different dimensions")
    _other_than(one, (-1, -2), "over samples")
    return int(one.samples or 0)


def _view(arguments: Sequence[Any], size: Size, count: int) -> int:
    """Blocks stay blocks where as much stands before their dimension as before."""
    x, place = _first(arguments)
    before = math.prod(x.size[:place])
    for dim, length in enumerate(size):
        if math.prod(size[:dim]) == before and length and length % count == 0:
            return dim
    raise Mixed("that cuts through samples")


def _expanded(arguments: Sequence[Any], size: Size, _: int) -> int:
    x, place = _first(arguments)
    return place - len(x.size) + len(size)


def _images(arguments: Sequence[Any], *_: Any) -> int:
    """A list of images, joined by their channels."""
    if {held.samples for held in _holding(arguments[:1])} != {0}:
        raise Mixed("with samples along another dimension than the first")
    return 0


def _permuted(arguments: Sequence[Any], *_: Any) -> int:
    x, place = _first(arguments)
    return [dim % len(x.size) for dim in arguments[1]].index(place)


def _transposed(arguments: Sequence[Any], *_: Any) -> int:
    x, place = _first(arguments)
    one, other = (dim % len(x.size) for dim in arguments[1:3] or (0, 1))
    return {one: other, other: one}.get(place, place)


def _selected(arguments: Sequence[Any], *_: Any) -> int:
    (x, place), dim = _first(arguments), int(arguments[1]) % len(arguments[0].size)
    _other_than(x, (dim,), "of one sample")
    return place - (dim < place)


def _along(place: int) -> Rule:
    """Works along the dimensions that argument ``place`` names, which stay."""

    def rule(arguments: Sequence[Any], *_: Any) -> int:
        (x, samples), dims = _first(arguments), arguments[place]
        if dims == ():
            raise Mixed("over all dimensions")
        _other_than(x, _listed(dims), "over samples")
        return samples

    return rule


def _reduced(arguments: Sequence[Any], *_: Any) -> int:
    (x, place), (dims, keeps) = _first(arguments), (*arguments[1:3], None, None)[:2]
    if not isinstance(dims, (int, tuple)) or isinstance(dims, bool) or dims == ():
        raise Mixed("over all dimensions")
    gone = {dim % len(x.size) for dim in _listed(dims)}
    _other_than(x, gone, "over samples")
    return place if keeps is True else place - sum(dim < place for dim in gone)


def _unsqueezed(arguments: Sequence[Any], *_: Any) -> int:
    x, place = _first(arguments)
    dim = int(arguments[1]) % (len(x.size) + 1)
    return place + (dim <= place)


def _squeezed(arguments: Sequence[Any], *_: Any) -> int:
    x, place = _first(arguments)
    if len(arguments) == 1:
        raise Mixed("of all dimensions")
    dims = {dim % len(x.size) for dim in _listed(arguments[1])}
    _other_than(x, dims, "of the dimension of samples")
    return place - sum(dim < place and x.size[dim] == 1 for dim in dims)


def _joined(arguments: Sequence[Any], *_: Any) -> int:
    parts = _holding(arguments[:1])
    found = {held.samples for held in parts}
    if len(found) != 1 or None in found:
        raise Mixed("of what holds samples along different dimensions")
    _other_than(parts[0], arguments[1:2], "of samples")
    return int(parts[0].samples or 0)


def _stacked(arguments: Sequence[Any], *_: Any) -> int:
    parts = _holding(arguments[:1])
    if len({held.samples for held in parts}) != 1:
        raise Mixed("of what holds samples along different dimensions")
    return _unsqueezed((parts[0], arguments[1]))


def _padded(arguments: Sequence[Any], *_: Any) -> int:
    (x, place), pads = _first(arguments), arguments[1]
    dims = [-1 - i // 2 for i, pad in enumerate(pads) if pad]
    _other_than(x, dims, "between samples")
    return place


def _layer_norm(arguments: Sequence[Any], *_: Any) -> int:
    x, place = _first(arguments)
    if place >= len(x.size) - len(arguments[1]):
        raise Mixed("over samples")
    return place


def _embedded(arguments: Sequence[Any], *_: Any) -> int:
    table, rows = arguments[:2]
    if table.samples is not None:
        raise Mixed("of each sample's own table")
    return int(rows.samples)


def _attention(arguments: Sequence[Any], _: Size, count: int) -> int:
    """[batch, heads, rows, width] three times, then what is added to scores: [batches, …], counted modulo its
    own number of them."""
    q, k, v, *added = _holding(arguments)
    found = {q.samples, k.samples, v.samples}
    if found not in ({0}, {1}) or len(q.size) != 4:
        raise Mixed("with samples along other dimensions than batch or heads")
    (place,) = found
    last, block = int(place or 0) - 4, q.size[0] // count if place == 0 else 1
    for held in added:
        each = 1 if len(held.size) < -last else held.size[last]
        if held.samples != place and (held.samples is not None or block % each):
            raise Mixed("with something else for each sample")
    return int(place or 0)


def _restrided(arguments: Sequence[Any], *_: Any) -> int:
    """In place, of a result whose strides a kernel had to choose: dimensions of size one apart."""
    x, place = _first(arguments)
    if tuple(arguments[1]) != x.size or arguments[3]:
        raise Mixed("to another size")
    return place


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
    (_leading(1), _OURS, "convolution averaged maxima quantized_planes"),
    (_leading(2), _OURS, "convolution_add gated quantized_product shuffled"),
    (_images, _OURS, "joined joined_rescaled"),
    (_rows, _OURS, "linear"),
    (_pointwise, _OURS, "quantized looked_up"),
    (_attention, _OURS, "attention attention_biased attention_biased_twice"),
    (_attention, "aten", "_scaled_dot_product_flash_attention_for_cpu"),
    (_leading(1), "onednn", "qconv_pointwise qconv2d_pointwise"),
    (_rows, "onednn", "qlinear_pointwise"),
    (_leading(1), "quantized", "conv1d conv2d conv3d conv1d_relu conv2d_relu conv3d_relu"),
    (_rows, "quantized", "linear linear_relu"),
    (_pointwise, "quantized", "add add_relu mul mul_relu hardswish sigmoid leaky_relu elu relu6"),
    (_joined, "quantized", "cat cat_relu"),
    (_along(1), "quantized", "softmax"),
    (_pointwise, "aten", "clone _to_copy copy_ dequantize quantize_per_tensor int_repr"),
    (_pointwise, "aten", "detach alias _make_per_tensor_quantized_tensor hardtanh clamp where"),
    (_view, "aten", "view _unsafe_view"),
    (_expanded, "aten", "expand"),
    (_pointwise, "aten", "zeros_like ones_like full_like"),
    (_permuted, "aten", "permute"),
    (_transposed, "aten", "transpose t"),
    (_selected, "aten", "select unbind"),
    (_along(1), "aten", "slice"),
    (_along(2), "aten", "split split_with_sizes"),
    (_along(2), "aten", "roll"),
    (_along(1), "aten", "_softmax _log_softmax flip"),
    (_reduced, "aten", "mean sum amax amin"),
    (_unsqueezed, "aten", "unsqueeze"),
    (_squeezed, "aten", "squeeze"),
    (_joined, "aten", "cat"),
    (_stacked, "aten", "stack"),
    (_padded, "aten", "constant_pad_nd reflection_pad2d replication_pad2d"),
    (_layer_norm, "aten", "native_layer_norm"),
    (_embedded, "aten", "embedding"),
    (_rows, "aten", "mm"),
    (_added_rows, "aten", "addmm"),
    (_batched_product, "aten", "bmm"),
    (_leading(1), "aten", "convolution mkldnn_convolution native_group_norm"),
    (_leading(1), "aten", "avg_pool2d avg_pool3d max_pool2d_with_indices"),
    (_leading(1), "aten", "max_pool3d_with_indices quantized_max_pool1d quantized_max_pool2d"),
    (_leading(1), "aten", "_adaptive_avg_pool2d _adaptive_avg_pool3d"),
    (_leading(1), "aten", "upsample_nearest1d upsample_nearest2d upsample_bilinear2d"),
    (_restrided, "aten", "as_strided_"),
    # of parts: as they are called in inference mode
    (_pointwise, "aten", "contiguous to"),
    (_view, "aten", "reshape flatten unflatten"),
    (_along(1), "aten", "softmax log_softmax narrow"),
    (_along(2), "aten", "chunk"),
    (_layer_norm, "aten", "layer_norm"),
    (_padded, "aten", "pad"),
    (_rows, "aten", "linear"),
    (_product, "aten", "matmul"),
    (_leading(1), "aten", "conv1d conv2d conv3d group_norm"),
    (_leading(1), "aten", "avg_pool1d max_pool1d max_pool2d max_pool3d"),
    (_leading(1), "aten", "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    (_attention, "aten", "scaled_dot_product_attention"),
)
_REPEATS = frozenset(
    f"aten::{name}"
    for name in ("expand", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
)
