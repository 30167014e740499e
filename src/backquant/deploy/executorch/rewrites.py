"""Operators that XNNPACK takes in one spelling only, in that spelling. Values stay what they were.

Source: ExecuTorch 1.5, ``backends/xnnpack/partition/config/generic_node_configs.py``.

1. ``mean`` over the two inner axes only with ``keepdim=True``: the axes are dropped behind it, behind a
   second pair of quantize and dequantize nodes when the result is quantized.
2. ``squeeze`` and ``unsqueeze`` become ``view``.
3. A ``view`` (also of ``flatten`` and ``reshape``) with one symbolic size has -1 there.
4. ``softmax`` over the last axis of a tensor of four dimensions runs on three. Behind a convolution
   XNNPACK's tensors lie channels last, and its softmax then runs over the channels: in ExecuTorch 1.5
   a silently wrong result.
5. ``select``, ``unbind`` and ``split``: see ``parts``.
6. ``rms_norm`` over the last axis becomes its arithmetic, with tensors in place of numbers.
7. ``prelu`` runs on four dimensions: the delegate takes it of any, wants its input channels last, and fails.
8. ``matmul`` of batches, and attention: see ``attention``.
9. A difference or product of integers in front of ``relu``, and any of three in front of ``hardtanh``, is
   rounded before it as well as behind: the delegate knows the one result between ``add`` and ``relu`` only.
   The values stay, since what the qparams of the clipped result cut off is clipped anyway.
10. Each reader of integers has a dequantize node of its own: one that a kernel on integers and an operator
   in float share counts as part of that kernel, and the delegate does not load.
11. ``batch_norm`` behind a linear layer, on three dimensions, reads a view of four: ExecuTorch 1.5 folds it
   into the layer as if its channels were the layer's output features. That is an error, or, where the two
   are equally many, a silently wrong result.
12. The Euclidean norm of vectors becomes products, a sum and a root; ``pow`` with one of the exponents 2.0,
   0.5 and -0.5 a product or a root; ``roll`` slices that are joined; and what an operator repeats by itself
   is not expanded for it. All run outside of the delegate otherwise, which they cut into parts: of Swin v2,
   with a norm of each query and key, half of the time.
13. Maxima over axes, and pools: see ``pools``.
14. A depthwise convolution in float with a large window: see ``depthwise``.
15. A whole number that is added to floats, or multiplied with them, is a float: otherwise it is cast at each
   call, outside of the delegate.
16. What pads a value that comes from integers for readers in float pads with the smallest float in place of
   zero: ExecuTorch 1.5 quantizes a pad of zeros behind integers, and the delegate does not load.
17. Paddings with negative sizes: see ``pads``; orders and counts: see ``orders``;
   resizing: see ``resizes``; volumes: see ``volumes``, ``volume_pools``; ``softplus`` and ``mish``: see
   ``softplus``.
18. A linear layer that measures its input at each call reads two axes where a convolution reaches it by
   values of four: ExecuTorch 1.5 puts a change of layout between input and layer, and refuses the model.
19. Means of integers with a free size: see ``means``.
20. A view of integers whose reader rounds it anew reads what is rounded so before it, which is the same: the
   delegate does not load one that changes the qparams.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from backquant.deploy import edits
from backquant.deploy.edits import (
    AtenCalls,
    Rules,
    arguments,
    before,
    first_only,
    operands,
    sizes_of,
)
from backquant.deploy.executorch.volumes import VOLUMES, product
from backquant.deploy.executorch.workarounds import (
    WORKAROUNDS,
    compute_in_float,
    means_of_free_sizes,
)
from backquant.deploy.program import stored_names
from backquant.lower.qdq import is_dequantize, is_quantize
from backquant.operators import named, overload, overloads
from backquant.operators.aten import cut_windows

# Attention in the spelling that XNNPACK takes: products of batches of matrices, a softmax, an addition.
#
# ExecuTorch decomposes ``scaled_dot_product_attention`` so that rows whose positions are all masked give
# zeros: six operators of each layer run outside of the delegate. Here
#
# 1. queries ``[batch, heads, length, depth]`` become ``[batch · groups, …]``; keys and values that several
#    heads share are not repeated (nor is what the model repeated itself): their heads' queries are rows of
#    one matrix;
# 2. a mask of truth values becomes numbers, 0 or -1e30, once for all layers that read it. A row whose
#    positions are all masked then gives the mean of the values, and not 0: the one difference.
# 3. ``matmul`` of two batches of the same sizes becomes ``bmm``, without an ``expand`` that does nothing.

RULES = Rules()
_EXPANSIONS = overloads("expand")
_MOVES = overloads("view", "reshape", "clone")
_MASKED = 1e30  # exp(-1e30) is 0, and scores are far smaller


@RULES.on(*named("matmul").aten)
def batched_product(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 3, in place; other products stay as they are."""
    one, other = operands(node)
    left, right = (value.meta["val"].shape for value in (one, other))
    if len(left) < 3 or len(left) != len(right) or list(left[:-2]) != list(right[:-2]):
        return None
    if len(left) == 3:
        return write.bmm(one, other)
    count = product(*left[:-2])
    if not all(isinstance(size, int) for size in (*left[-2:], *right[-2:])):
        return None
    flat = [
        write.reshape(value, [count, *shape[-2:]]) for value, shape in ((one, left), (other, right))
    ]
    made = write.bmm(*flat)
    sizes = sizes_of(node)
    is_known = all(isinstance(size, int) for size in sizes)
    return write.reshape(made, sizes) if is_known else None


@dataclass(frozen=True)
class _Sizes:
    """Of one attention. ``batch`` is -1 where it is symbolic; then nothing else is."""

    batch: int
    heads: int
    groups: int  # heads of keys and values
    length: int
    positions: int
    depth: int
    width: int  # of the values

    @classmethod
    def of(cls, query: Any, key: Any, value: Any) -> _Sizes | None:
        shapes = [x.meta["val"].shape for x in (query, key, value)]
        if any(len(shape) != 4 for shape in shapes):
            return None
        if not all(isinstance(size, int) for shape in shapes for size in shape[1:]):
            return None
        batch = shapes[0][0]
        if any(shape[0] != batch for shape in shapes) or shapes[1][1] != shapes[2][1]:
            return None
        _, heads, length, depth = shapes[0]
        _, groups, positions, width = shapes[2]
        if heads % groups:
            return None
        batch = batch if isinstance(batch, int) else -1
        return cls(batch, heads, groups, length, positions, depth, width)

    @property
    def count(self) -> int:
        return -1 if self.batch < 0 else self.batch * self.groups

    @property
    def rows(self) -> int:
        """The number of queries that read the same keys."""
        return self.heads // self.groups * self.length


@dataclass
class AttentionRewriter:
    """Rules 1 and 2 on one graph, node by node; ``masks``: those that are numbers already."""

    masks: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, node: fx.Node, write: AtenCalls) -> Any:
        query, key, value, mask, dropout, causal, scale, _ = arguments(node).values()
        key, value = _shared(key, value)
        sizes = _Sizes.of(query, key, value)
        if sizes is None or dropout:
            return None
        scale = sizes.depth**-0.5 if scale is None else float(scale)
        flat = write.reshape(query, [sizes.count, sizes.rows, sizes.depth])
        scaled = write.mul(flat, scale)
        keys = write.reshape(key, [sizes.count, sizes.positions, sizes.depth])
        scores = write.bmm(scaled, write.permute(keys, [0, 2, 1]))
        if causal:
            scores = self._masked(node, scores, _causal(node, sizes), sizes)
        if mask is not None:
            scores = self._masked(node, scores, self._number(node, mask), sizes)
        weights = write.softmax(scores, -1)
        values = write.reshape(value, [sizes.count, sizes.positions, sizes.width])
        mixed = write.bmm(weights, values)
        shape = [sizes.batch, sizes.heads, sizes.length, sizes.width]
        order = _order_in_memory(node.meta["val"])
        turned = write.permute(write.reshape(mixed, shape), order)
        # PyTorch's result lies in memory so, and views of it count on that
        laid = write.clone(turned, memory_format=torch.contiguous_format)
        return write.permute(laid, [order.index(axis) for axis in range(4)])

    def _masked(self, node: fx.Node, scores: Any, mask: Any, sizes: _Sizes) -> Any:
        """``scores + mask``, whose sizes are broadcast to batch, heads, length, positions."""
        write, shape = AtenCalls(node), [*mask.meta["val"].shape]
        if sizes.groups == sizes.heads and all(size == 1 for size in shape[:-2]):
            if len(shape) > 2:
                mask = write.reshape(mask, shape[-2:])
            return write.add(scores, mask)
        full = [sizes.batch, sizes.heads, sizes.length, sizes.positions]
        added = write.add(write.reshape(scores, full), mask)
        return write.reshape(added, [sizes.count, sizes.rows, sizes.positions])

    def _number(self, node: fx.Node, mask: Any) -> Any:
        if mask.meta["val"].dtype is not torch.bool:
            return mask
        if mask not in self.masks:
            write = AtenCalls(node)
            ones = write.to(mask, torch.float32)
            self.masks[mask] = write.mul(write.sub(ones, 1.0), _MASKED)
        return self.masks[mask]


def _shared(*repeated: Any) -> tuple[Any, ...]:
    """Keys and values before each head was repeated for its queries; as they are when none was."""
    found = []
    for value in repeated:
        source = value
        while source.op == "call_function" and source.target in _MOVES:
            source = source.args[0]
        shape = value.meta["val"].shape
        if source.op != "call_function" or source.target not in _EXPANSIONS:
            return repeated
        wide, once = source.meta["val"].shape, source.args[0].meta["val"].shape
        if len(wide) != 5 or [*once] != [*wide[:2], 1, *wide[3:]]:
            return repeated
        if [*shape] != [wide[0], wide[1] * wide[2], *wide[3:]]:
            return repeated
        sizes = sizes_of(source)
        found.append(AtenCalls(value).reshape(source.args[0], [*sizes[:2], *sizes[3:]]))
    return tuple(found)


def _order_in_memory(value: torch.Tensor) -> list[int]:
    """The axes of ``value``, that with the longest steps in memory first."""
    steps = [step if isinstance(step, int) else int(step.node.hint) for step in value.stride()]
    return sorted(range(value.dim()), key=lambda axis: (-steps[axis], axis))


def _causal(node: fx.Node, sizes: _Sizes) -> Any:
    """A constant: -1e30 behind the position of the query."""
    write = AtenCalls(node)
    return write.triu(write.full([sizes.length, sizes.positions], -_MASKED), 1)


_LINEARS = overloads("linear")
_ARITHMETIC = overloads("add", "sub", "mul")
_REPEATING = {overload(name, "Tensor") for name in ("add", "sub", "mul", "div")}
_IMAGE = 4  # axes: sample, channels, rows, columns
_PAD, _PAD_IN_A_WAY = overload("constant_pad_nd"), overload("pad")
_VIEWS = overloads("view", "reshape", "flatten")
_SQUEEZES = overloads("squeeze", "unsqueeze")
_SOFTMAXES = {*overloads("softmax"), *(each.ends_in for each in named("softmax").decompositions)}


def rewrite(program: ExportedProgram) -> None:
    """Apply the rules in place, in graph order."""
    attention = dict.fromkeys(overloads("scaled_dot_product_attention"), AttentionRewriter())
    cut_windows(program.graph)
    for node in list(means_of_free_sizes(program.graph)):
        compute_in_float(node)
    edits.rewrite(program, RULES | WORKAROUNDS | VOLUMES | attention)
    _pad_in_float(program.graph)
    _dequantize_for_each_reader(program)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


@RULES.on(*named("mean").aten)
def _mean(node: fx.Node, write: AtenCalls) -> Any:
    said = arguments(node)
    source, axes, keep = said["self"], said.get("dim"), said.get("keepdim")
    rank = source.meta["val"].dim()
    if keep or rank != 4 or not axes or sorted(axis % rank for axis in axes) != [2, 3]:
        return None
    value = _rounded(node, write.call(node.target, source, axes, True))
    return write.view(value, sizes_of(node))


def _rounded(node: fx.Node, value: Any) -> Any:
    """``value`` as the one reader of ``node`` quantizes its result; as it is where none does."""
    users = list(node.users)
    if len(users) != 1 or not is_quantize(users[0]):
        return value
    qparams = users[0].args[1:]
    quantized = before(node, users[0].target, (value, *qparams))
    dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    return before(node, dequantize, (quantized, *qparams))


@RULES.on(*overloads("relu", "hardtanh"))
def _clip(node: fx.Node, _: AtenCalls) -> None:
    """Rule 9, at ``relu`` or ``hardtanh``."""
    source = operands(node)[0]
    is_relu = node.target in overloads("relu")
    rounded_first = _ARITHMETIC - overloads("add") if is_relu else _ARITHMETIC
    if source.target not in rounded_first or len(source.users) != 1:
        return
    if all(is_dequantize(value) for value in source.all_input_nodes):
        node.replace_input_with(source, _rounded(node, source))


def _dequantize_for_each_reader(program: ExportedProgram) -> None:
    """Rule 10, in place, for activations whose qparams are known, inputs of the model among them."""
    stored = stored_names(program)
    for node in list(program.graph.nodes):
        if not is_dequantize(node) or node.args[0].name in stored:
            continue
        for user in list(node.users)[1:]:
            user.replace_input_with(node, before(user, node.target, node.args))


def _pad_in_float(graph: Any) -> None:
    """Rule 16, in place, also for what other rules have written."""
    for target, way in ((_PAD, ()), (_PAD_IN_A_WAY, ("constant",))):
        for node in graph.find_nodes(op="call_function", target=target):
            source, sizes, *more = node.args
            value = more[len(way) :] or [node.kwargs.get("value")]
            if not is_dequantize(source) or any(map(is_quantize, node.users)):
                continue
            if (
                tuple(more[: len(way)]) in (way, ())
                and not node.kwargs.get("mode")
                and not any(value)
            ):
                node.args = (source, sizes, *way, torch.finfo(torch.float32).tiny)
                node.kwargs = {}


def _round_first(node: fx.Node) -> None:
    """Rule 20."""
    source, users = operands(node)[0], list(node.users)
    if not is_dequantize(source) or len(users) != 1 or not is_quantize(users[0]):
        return
    if tuple(users[0].args[1:]) != tuple(source.args[1:]):
        node.replace_input_with(source, _rounded(node, source))


@RULES.on(*_SQUEEZES)
def _squeeze(node: fx.Node, write: AtenCalls) -> Any:
    _round_first(node)
    return write.view(node.args[0], sizes_of(node))


@RULES.on(*overloads("rms_norm"))
def _rms_norm(node: fx.Node, write: AtenCalls) -> Any:
    source, sizes, weight, eps = arguments(node).values()
    value = source.meta["val"]
    if len(sizes) != 1 or value.dtype is not torch.float32:
        return None
    eps = torch.finfo(value.dtype).eps if eps is None else eps
    mean = write.mean(write.mul(source, source), [-1], True)
    scaled = write.mul(source, write.rsqrt(write.add(mean, eps)))
    return scaled if weight is None else write.mul(scaled, weight)


@RULES.on(*_VIEWS)
def _view(node: fx.Node, write: AtenCalls) -> Any:
    _round_first(node)
    sizes = sizes_of(node)
    symbolic = any(not isinstance(size, int) for size in node.meta["val"].shape)
    changes = node.target is not overload("view") or symbolic
    return write.view(node.args[0], sizes) if changes else None


@RULES.on(*_SOFTMAXES)
def _softmax(node: fx.Node, write: AtenCalls) -> Any:
    source, axis, *more = operands(node)
    shape = source.meta["val"].shape
    if len(shape) != 4 or axis not in (-1, 3) or not _follows_convolution(source):
        return None
    # all but the first axis, which may be symbolic, and the last one become one
    flat = write.view(source, sizes_of(write.flatten(source, 1, 2)))
    inner = write.call(node.target, flat, -1, *more)
    return write.view(inner, sizes_of(node))


@RULES.on(*overloads("prelu"))
def _prelu(node: fx.Node, write: AtenCalls) -> Any:
    source, weight = node.args
    sizes = sizes_of(node)
    two_free = not all(isinstance(size, int) for size in sizes)  # no view can say them
    if len(sizes) == 4 or two_free or (len(sizes) > 4 and -1 in sizes):
        return None
    leading = sizes if len(sizes) > 1 else [1, 1, *sizes]
    four = (
        [*leading, 1, 1][:4] if len(sizes) < 4 else [*sizes[:2], math.prod(sizes[2:-1]), sizes[-1]]
    )
    inner = write.call(node.target, write.view(source, four), weight)
    return write.view(inner, sizes)


@RULES.on("_native_batch_norm_legit_no_training")
def _batch_norm(node: fx.Node, write: AtenCalls) -> Any:
    source = operands(node)[0]
    sizes = sizes_of(source)
    if source.target not in _LINEARS or len(sizes) != 3 or not first_only(node):
        return None
    if sum(not isinstance(size, int) for size in source.meta["val"].shape) > 1:
        return None  # no view can say them
    made = write.call(node.target, write.view(source, [*sizes, 1]), *operands(node)[1:])
    return write.view(write.call(operator.getitem, made, 0), sizes)


@RULES.on("linalg_vector_norm")
def _vector_norm(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 12."""
    source, order, axes, keep, _ = arguments(node).values()
    if order != 2 or axes is None or node.kwargs or source.meta["val"].dtype is not torch.float32:
        return None
    total = write.call(overload("sum", "dim_IntList"), write.mul(source, source), axes, keep)
    return write.sqrt(total)


@RULES.on("pow.Tensor_Scalar")
def _power(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 12."""
    source, exponent = operands(node)
    if source.meta["val"].dtype is not torch.float32:
        return None
    if exponent == 2:
        return write.mul(source, source)
    if exponent not in (0.5, -0.5):
        return None
    return write.sqrt(source) if exponent > 0 else write.rsqrt(source)


@RULES.on(*overloads("roll"))
def _roll(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 12, where the sizes are known."""
    made, shifts, axes = arguments(node).values()
    sizes = made.meta["val"].shape
    if len(axes) != len(shifts) or not all(isinstance(sizes[axis], int) for axis in axes):
        return None
    for shift, axis in zip(shifts, axes, strict=True):
        size = sizes[axis]
        start = size - shift % size if size else 0
        if start not in (0, size):
            parts = write.slice(made, axis, start, size), write.slice(made, axis, 0, start)
            made = write.cat(parts, axis % len(sizes))
    return made


@RULES.on(*_EXPANSIONS)
def _expand(node: fx.Node, _: AtenCalls) -> None:
    """Rule 12: readers that compute with another value of the full size repeat it themselves."""
    source, value = operands(node)[0], node.meta["val"]
    if source.meta["val"].dim() != value.dim():
        return
    for user in list(node.users):
        pair = operands(user)[:2] if user.target in _REPEATING else ()
        others = [each for each in pair if each is not node]
        if [getattr(each, "meta", {}).get("val") is not None for each in others] != [True]:
            continue
        if others[0].meta["val"].shape == value.shape:
            user.replace_input_with(node, source)


@RULES.on(*_REPEATING)
def _with_number(node: fx.Node, _: AtenCalls) -> None:
    """Rule 15."""
    one, other, *more = operands(node)
    if type(other) is int and one.meta["val"].is_floating_point():
        node.args = (one, float(other), *more)


_LAYOUT_GIVERS = overloads(
    *("conv2d", "convolution", "conv_transpose2d", "max_pool2d", "avg_pool2d"),
    "adaptive_avg_pool2d",
)
_LAYOUT_TAKERS = overloads(
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "linear"
)


@RULES.on(*_LINEARS)
def _linear(node: fx.Node, write: AtenCalls) -> Any:
    """Rule 18."""
    value, quantized = operands(node)[0], torch.ops.quantized_decomposed
    if (
        value.target is not quantized.dequantize_per_tensor.tensor
        or value.meta["val"].dim() != _IMAGE
    ):
        return None
    quantize = value.args[0]
    scale = quantize.args[1]
    if not isinstance(scale, fx.Node) or not _made_of_images(quantize.args[0]):
        return None
    chosen: Any = scale.args[0]
    flat = write.reshape(quantize.args[0], [-1, sizes_of(value)[-1]])
    found = write.call(chosen.target, flat, *chosen.args[1:], **chosen.kwargs)
    pair = [write.call(operator.getitem, found, place) for place in (0, 1)]
    rounded = write.call(quantize.target, flat, *pair, *quantize.args[3:], **quantize.kwargs)
    back = write.call(value.target, rounded, *pair, *value.args[3:], **value.kwargs)
    made = write.call(node.target, back, *operands(node)[1:], **node.kwargs)
    return write.view(made, sizes_of(node))


def _made_of_images(node: fx.Node) -> bool:
    """Whether a convolution or pool reaches ``node`` by values of four axes, permuted or not."""

    def passes(each: fx.Node) -> bool:
        return getattr(each.meta.get("val"), "ndim", 0) == _IMAGE

    return _reached_by_layout(node, passes, passes)


def _follows_convolution(node: fx.Node) -> bool:
    """Whether a value that XNNPACK keeps channels last reaches ``node`` in that layout."""
    return _reached_by_layout(
        node,
        lambda each: each.op == "call_function",
        lambda each: each.target not in _LAYOUT_TAKERS,
    )


def _reached_by_layout(
    node: fx.Node, counts: Callable[[fx.Node], bool], passes: Callable[[fx.Node], bool]
) -> bool:
    """Whether what gives a layout is ``node``, or reaches it by nodes that count and pass it on."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        each = stack.pop()
        if each in seen or not counts(each):
            continue
        seen.add(each)
        if each.target in _LAYOUT_GIVERS:
            return True
        if passes(each):
            stack += each.all_input_nodes
    return False
