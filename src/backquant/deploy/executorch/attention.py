"""Attention in the spelling that XNNPACK takes: products of batches of matrices, a softmax, an addition.

ExecuTorch decomposes ``scaled_dot_product_attention`` so that rows whose positions are all masked give
zeros: six operators of each layer run outside of the delegate. Here

1. queries ``[batch, heads, length, depth]`` become ``[batch · groups, …]``; keys and values that several
   heads share are not repeated (nor is what the model repeated itself): their heads' queries are rows of
   one matrix;
2. a mask of truth values becomes numbers, 0 or -1e30, once for all layers that read it. A row whose
   positions are all masked then gives the mean of the values, and not 0: the one difference.
3. ``matmul`` of two batches of the same sizes becomes ``bmm``, without an ``expand`` that does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from backquant.deploy.edits import AtenCalls, sizes_of
from backquant.operators import overloads

_EXPANSIONS = overloads("expand")
_MOVES = overloads("view", "reshape", "clone")
_MASKED = 1e30  # exp(-1e30) is 0, and scores are far smaller


def batched_product(node: Any, write: AtenCalls) -> Any:
    """Rule 3, in place; other products stay as they are."""
    one, other = node.args
    left, right = (value.meta["val"].shape for value in (one, other))
    if len(left) < 3 or len(left) != len(right) or list(left[:-2]) != list(right[:-2]):
        return None
    if len(left) == 3:
        return write.bmm(one, other)
    count = _product(left[:-2])
    if not all(isinstance(size, int) for size in (*left[-2:], *right[-2:])):
        return None
    flat = [
        write.reshape(value, [count, *shape[-2:]]) for value, shape in ((one, left), (other, right))
    ]
    product = write.bmm(*flat)
    sizes = sizes_of(node)
    is_known = all(isinstance(size, int) for size in sizes)
    return write.reshape(product, sizes) if is_known else None


def _product(sizes: Any) -> int:
    """-1 where one of them is symbolic."""
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            return -1
        count *= size
    return count


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

    def __call__(self, node: Any, write: AtenCalls) -> Any:
        query, key, value, mask, dropout, causal = (*node.args, None, 0.0, False)[:6]
        mask = node.kwargs.get("attn_mask", mask)
        causal = node.kwargs.get("is_causal", causal)
        key, value = _shared(key, value)
        sizes = _Sizes.of(query, key, value)
        if sizes is None or node.kwargs.get("dropout_p", dropout):
            return None
        scale = node.kwargs.get("scale")
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

    def _masked(self, node: Any, scores: Any, mask: Any, sizes: _Sizes) -> Any:
        """``scores + mask``, whose sizes are broadcast to batch, heads, length, positions."""
        write, shape = AtenCalls(node), [*mask.meta["val"].shape]
        if sizes.groups == sizes.heads and all(size == 1 for size in shape[:-2]):
            if len(shape) > 2:
                mask = write.reshape(mask, shape[-2:])
            return write.add(scores, mask)
        full = [sizes.batch, sizes.heads, sizes.length, sizes.positions]
        added = write.add(write.reshape(scores, full), mask)
        return write.reshape(added, [sizes.count, sizes.rows, sizes.positions])

    def _number(self, node: Any, mask: Any) -> Any:
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
        is_repeated = (
            len(wide) == 5
            and once[2] == 1
            and [*once[:2], *once[3:]]
            == [
                *wide[:2],
                *wide[3:],
            ]
        )
        if not is_repeated or [*shape] != [wide[0], wide[1] * wide[2], *wide[3:]]:
            return repeated
        found.append(AtenCalls(value).reshape(source.args[0], _without_2(source)))
    return tuple(found)


def _without_2(repeated: Any) -> list[Any]:
    sizes = sizes_of(repeated)
    return [*sizes[:2], *sizes[3:]]


def _order_in_memory(value: torch.Tensor) -> list[int]:
    """The axes of ``value``, that with the longest steps in memory first."""
    steps = [step if isinstance(step, int) else int(step.node.hint) for step in value.stride()]
    return sorted(range(value.dim()), key=lambda axis: (-steps[axis], axis))


def _causal(node: Any, sizes: _Sizes) -> Any:
    """A constant: -1e30 behind the position of the query."""
    write = AtenCalls(node)
    return write.triu(write.full([sizes.length, sizes.positions], -_MASKED), 1)
