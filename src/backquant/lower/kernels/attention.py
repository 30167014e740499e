"""Attention whose result is rounded to integers, by the library of kernels (``backquant.native``) where it is
here and takes it, else by PyTorch's operators.

Its products are of floats in the model. The library multiplies whole numbers of 16 bits where the CPU has
VNNI, floats elsewhere: its integers are those of PyTorch's operators, but for some that lie in the middle of
two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from backquant.lower.kernels.boundary import quantize
from backquant.lower.kernels.prepared import is_plain
from backquant.native.library import is_here

MOST_KEYS = 4096  # so that a few rows of scores fit into the L2 cache
MOST_ADDED = 2
# with fewer queries, and less than one for so many keys, PyTorch's products take no longer than to pack these
_FEW_QUERIES, _KEYS_EACH = 12, 16
_HIDDEN = -1e9  # added to a score, it leaves nothing of it

Quantize = Callable[..., torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: What may stand between the first product and the softmax, by the words of ``between``; before that
#: ``QUERIES``, what happens to the queries by a number.
STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "add": torch.add,
    "reshape": torch.reshape,
    "masked_fill": lambda x, given: x.masked_fill(*given),
}
QUERIES: dict[str, Callable[..., torch.Tensor]] = {
    "queries_mul": torch.mul,
    "queries_div": torch.div,
}


def attended(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    between: Sequence[tuple[str, Any]],
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    """``softmax(between(x @ keys), -1) @ values`` of floats as uint8. ``between``: what happens to queries
    and scores, each as a word of ``QUERIES`` or ``STEPS`` and what it takes.

    >>> x = torch.tensor([[[1.0, 0.0]]])
    >>> attended(x, x.transpose(1, 2), x, (("mul", 0.5),), 0.01, 3)
    tensor([[[103,   3]]], dtype=torch.uint8)
    """
    if _is_taken(x, values):
        scores = _between(x, keys, between)
        if scores is not None:
            found = _by_library(scores, keys.transpose(-1, -2), values, out_scale, out_zero_point)
            if found is not None:
                return found
    return products(x, keys, values, between, out_scale, out_zero_point)


def products(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    between: Sequence[tuple[str, Any]],
    out_scale: float,
    out_zero_point: int,
    *,
    rounded: Quantize = quantize,
    product: Product = torch.matmul,
) -> torch.Tensor:
    """``attended`` by operators, as the model has them.

    >>> x = torch.tensor([[[1.0, 0.0]]])
    >>> products(x, x.transpose(1, 2), x, (), 0.01, 3)
    tensor([[[103,   3]]], dtype=torch.uint8)
    """
    for word, given in between:
        x = QUERIES[word](x, given) if word in QUERIES else x
    scores = product(x, keys)
    for word, given in between:
        scores = STEPS[word](scores, given) if word in STEPS else scores
    found = product(torch.softmax(scores, -1), values)
    return rounded(found, out_scale, out_zero_point, 0, 255, torch.uint8)


def attended_whole(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    factor: float | None,
    enable_gqa: bool,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` as uint8.

    >>> x = torch.tensor([[[[1.0, 0.0]]]])
    >>> attended_whole(x, x, x, None, False, None, False, 0.01, 3)
    tensor([[[[103,   3]]]], dtype=torch.uint8)
    """
    if _is_taken(x, values) and x.dim() == 4 and not enable_gqa:
        scores = _whole(x, keys, mask, is_causal, factor)
        if scores is not None:
            found = _by_library(scores, keys, values, out_scale, out_zero_point)
            if found is not None:
                return found
    given = (mask, is_causal, factor, enable_gqa)
    return whole(x, keys, values, *given, out_scale, out_zero_point)


def whole(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    factor: float | None,
    enable_gqa: bool,
    out_scale: float,
    out_zero_point: int,
    *,
    rounded: Quantize | None = None,
    attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention,
) -> torch.Tensor:
    """``attended_whole`` by PyTorch's operator."""
    found = attend(x, keys, values, mask, 0.0, is_causal, scale=factor, enable_gqa=enable_gqa)
    if rounded is None:
        rounded = _rounded_as_it_lies
    return rounded(found, out_scale, out_zero_point, 0, 255, torch.uint8)


def _rounded_as_it_lies(x: torch.Tensor, *given: Any) -> torch.Tensor:
    """Quantized, with the layout of ``x`` where that is [batch, query, head, dim]."""
    turned = x.transpose(1, 2) if x.dim() == 4 else x
    is_turned = turned is not x and turned.is_contiguous()
    return quantize(turned, *given).transpose(1, 2) if is_turned else quantize(x, *given)


@dataclass(frozen=True)
class _Scores:
    """``softmax(x @ keys * factor + added)``; ``added`` as the library takes it."""

    x: torch.Tensor
    factor: float = 1.0
    added: tuple[torch.Tensor, ...] = field(default=())


def _is_taken(x: torch.Tensor, values: torch.Tensor) -> bool:
    known = is_plain(x) and is_plain(values) and x.dtype == torch.float32
    if not known or x.dim() not in (3, 4) or values.dim() != x.dim() or not is_here():
        return False
    queries, keys = x.shape[-2], values.shape[-2]
    return keys <= MOST_KEYS and queries >= min(_FEW_QUERIES, keys / _KEYS_EACH)


def _whole(
    x: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    factor: float | None,
) -> _Scores | None:
    scale = 1.0 / math.sqrt(x.shape[-1]) if factor is None else float(factor)
    if is_causal and mask is not None:  # PyTorch refuses both
        return None
    if is_causal:
        mask = torch.ones(x.shape[-2], keys.shape[-2], dtype=torch.bool).tril()
    if mask is None:
        return _Scores(x, scale)
    shape = (*x.shape[:3], keys.shape[-2])
    term = _term(_shown(mask) if mask.dtype == torch.bool else mask, 4, shape)
    return None if term is None else _Scores(x, scale, (term,))


def _shown(mask: torch.Tensor) -> torch.Tensor:
    """What is added to scores of which only those are read where ``mask`` holds."""
    return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def _between(
    x: torch.Tensor, keys: torch.Tensor, between: Sequence[tuple[str, Any]]
) -> _Scores | None:
    """The scores of ``attended``; ``None`` for what the library has no form of."""
    if keys.dim() != x.dim():
        return None
    rank = x.dim()
    own = (*x.shape[:-1], keys.shape[-1])  # of the scores
    shape, factor = own, 1.0
    added: list[torch.Tensor] = []
    for word, given in between:
        if word == "reshape":
            found = _reshaped(shape, given)
            if found is None or rank != 4:
                return None
            shape = found
        elif word in ("mul", "div", *QUERIES):
            if added:
                return None
            scaled = _scaled(x, factor, word.removeprefix("queries_"), given, shape == own)
            if scaled is None:
                return None
            x, factor = scaled
        else:
            term = given if word == "add" else _hidden(*given)
            fitted = None if term is None else _term(term, len(shape), own)
            if fitted is None or len(added) == MOST_ADDED:
                return None
            added.append(fitted)
    return _Scores(x, factor, tuple(added)) if len(shape) == rank else None


def _reshaped(shape: tuple[int, ...], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """``shape`` reshaped to ``sizes``, where that leaves heads, queries and keys alone.

    >>> _reshaped((4, 3, 5, 5), (2, -1, 3, 5, 5)), _reshaped((4, 3, 5, 5), (2, 6, 5, 5))
    ((2, 2, 3, 5, 5), None)
    """
    known = math.prod(size for size in sizes if size != -1)
    count = math.prod(shape)
    if list(sizes).count(-1) > 1 or known <= 0 or count % known:
        return None
    found = tuple(count // known if size == -1 else size for size in sizes)
    kept = len(found) >= 4 and found[-3:] == shape[-3:] and math.prod(found) == count
    return found if kept else None


def _scaled(
    x: torch.Tensor, factor: float, word: str, given: Any, as_made: bool
) -> tuple[torch.Tensor, float] | None:
    """Queries and factor, of which the scores are ``given`` times as large, or a ``given`` th."""
    if isinstance(given, (int, float)):
        number = given if word == "mul" else 1.0 / given if given else math.inf
        return x, factor * number
    one_each = isinstance(given, torch.Tensor) and given.dtype == torch.float32 and as_made
    if not one_each or given.dim() > x.dim() or any(size != 1 for size in given.shape[-2:]):
        return None
    return STEPS[word](x, given), factor


def _hidden(mask: torch.Tensor, value: float) -> torch.Tensor | None:
    """What is added in place of setting scores to ``value`` where ``mask`` holds."""
    if not isinstance(value, (int, float)) or value > _HIDDEN or mask.dtype != torch.bool:
        return None
    return torch.zeros(mask.shape).masked_fill_(mask, value)


def added_shape(value: Any, rank: int, shape: tuple[Any, ...]) -> tuple[int, ...] | None:
    """How a term that is added to scores of ``rank`` dimensions looks as ``[batches, heads, queries, keys]``;
    the batches of ``shape``, those of the scores themselves, are counted modulo its own.

    >>> mask = torch.zeros(1, 2, 1, 5, 7)  # windows of images
    >>> added_shape(mask, 5, (6, 3, 5, 7)), added_shape(mask, 5, (6, 3, 5, 9))
    ((2, 1, 5, 7), None)
    """
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return None
    if len(shape) == 3:  # [batches, queries, keys]: without heads
        shape = (shape[0], 1, *shape[1:])
    sizes = list(value.shape)
    if not all(isinstance(size, int) for size in (*sizes, *shape[1:])) or len(sizes) > rank:
        return None
    sizes = [1] * (max(rank, 4) - len(sizes)) + sizes
    if rank == 3:
        sizes = [sizes[1], 1, *sizes[2:]]
    *lead, heads, queries, keys = sizes
    while lead and lead[0] == 1:
        lead.pop(0)
    batches = math.prod(lead)
    if 1 in lead or keys != shape[3]:
        return None
    if heads not in (1, shape[1]) or queries not in (1, shape[2]):
        return None
    return (batches, heads, queries, keys)


def _term(value: Any, rank: int, shape: tuple[int, ...]) -> torch.Tensor | None:
    found = added_shape(value, rank, shape)
    if found is None or not is_plain(value) or shape[0] % found[0]:
        return None
    return _side_by_side(value.reshape(found))


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _by_library(
    scores: _Scores, k: torch.Tensor, v: torch.Tensor, out_scale: float, out_zero_point: int
) -> torch.Tensor | None:
    parts = (scores.x, k, v)
    if not all(is_plain(x) and x.dtype == torch.float32 for x in parts):
        return None
    q, lead = scores.x, scores.x.shape[:-2]
    same = lead == k.shape[:-2] == v.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not same or k.shape[-2] != v.shape[-2]:
        return None
    heads = [_side_by_side(x if x.dim() == 4 else x.unsqueeze(1)) for x in parts]
    run = _operators()[len(scores.added)]
    found: torch.Tensor = run(*heads, *scores.added, scores.factor, out_scale, out_zero_point)
    return found if q.dim() == 4 else found.squeeze(1)


def _operators() -> tuple[Any, ...]:
    """The library's, by how many terms are added."""
    run = torch.ops.backquant_kernels
    return run.attention.default, run.attention_biased.default, run.attention_biased_twice.default
