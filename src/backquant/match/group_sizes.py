"""Which group size an operator takes where it does not take the one that is requested: tried, not guessed.

1. A size that is proposed divides the weight's axis, is one that the dtype config has scales for, and
   satisfies the conditions of the entry and of the dtype config, which may speak of it.
2. Of several the nearest to the requested one, by their ratio. Where there is none, no size is proposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.dtypes import Granularity
from backquant.match.conditions import unmet
from backquant.match.constraints import divides
from backquant.match.plan import TensorRequest
from backquant.match.refusal import Refusal
from backquant.operators.facts import UseFacts


def divided(asked: TensorRequest, use: UseFacts) -> tuple[Refusal, ...]:
    """The refusal of a group or block size that does not divide the weight, if it does not."""
    wrong = divides(asked, *use.weight_shape())
    return () if wrong is None else (wrong,)


def with_group_size(
    refusals: tuple[Refusal, ...],
    asked: TensorRequest | None,
    use: UseFacts,
    of: tuple[BackendPatternConfig, DTypeConfig],
) -> tuple[Refusal, ...]:
    """``refusals``, which propose one group size that ends them all, or none."""
    if not refusals or asked is None or asked.shared_over.kind != "per_group":
        return refusals
    size = _size_that_fits(asked, use, of)
    silent = tuple(replace(one, fix="") if _is_of_size(one) else one for one in refusals)
    if size is None:
        return silent
    return (
        replace(refusals[0], fix=f"group_size={size}"),
        *(replace(o, fix="") for o in refusals[1:]),
    )


def _is_of_size(refusal: Refusal) -> bool:
    return refusal.fix.startswith(("group size", "group_size"))


def _size_that_fits(
    asked: TensorRequest, use: UseFacts, of: tuple[BackendPatternConfig, DTypeConfig]
) -> int | None:
    """Rules 1 and 2."""
    requested = asked.shared_over.size
    config, one = of
    demand = one.weight_dtype_with_constraints.granularity
    if requested is None or demand is None:
        return None
    for size in sorted(_divisors(asked, use), key=lambda n: abs(math.log(n / requested))):
        shared = replace(asked.shared_over, size=size)
        with_size = replace(use, group_size=size)
        if not Granularity.parse(demand).admits(shared):
            continue
        if not unmet(config.where, with_size) and not unmet(one.where, with_size):
            return size
    return None


def _divisors(asked: TensorRequest, use: UseFacts) -> Iterator[int]:
    """Sizes of two weights or more that divide the axis."""
    shape, _ = use.weight_shape()
    axis = -1 if asked.shared_over.axis is None else asked.shared_over.axis
    length = shape[axis] if -len(shape) <= axis < len(shape) else 0
    yield from (n for n in range(2, length + 1) if length % n == 0)
