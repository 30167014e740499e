"""Rules about one dtype with its constraints.

1. ``bounds-order``: a lower bound above its upper bound admits nothing; integers have two values or more.
2. ``bounds-half-set``: one bound without the other is legal.
3. ``bounds-unreachable``: bounds outside of what the dtype can hold.
4. ``fixed-qparams``: a fixed scale has a zero point, both inside of the bounds and the range.
5. ``extended-constraints``: symmetric, granularity and power-of-two that contradict the others.
   ``scale-domain``: no scale is left by ``scales``, ``scale_range``, ``power_of_two_scale`` and the bounds.
6. ``constraints-without-dtype``: nothing to constrain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from backquant.backend_config.dtypes import DTypeWithConstraints
from backquant.backend_config.validate.finding import Finding, Place
from backquant.dtypes import Granularity, find_dtype, integer_range, is_scaled_float


def constraint_findings(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    """Everything that the rules of this module say about ``given``.

    >>> import torch
    >>> wrong = DTypeWithConstraints(torch.quint8, quant_min_lower_bound=9, quant_max_upper_bound=3)
    >>> [finding.rule for finding in constraint_findings(wrong, Place(0, "torch.add"))]
    ['bounds-order']
    """
    if given == DTypeWithConstraints(given.dtype):
        return
    if given.dtype is None:
        message = "constraints without a dtype have no effect"
        yield place.find("warning", "constraints-without-dtype", message, "set dtype")
        return
    yield from _order(given, place)
    yield from _half_set(given, place)
    yield from _reachable(given, place)
    yield from _fixed(given, place)
    yield from _extended(given, place)


def _pairs(given: DTypeWithConstraints) -> Iterator[tuple[str, float | None, str, float | None]]:
    low, high = given.quant_min_lower_bound, given.quant_max_upper_bound
    yield "quant_min_lower_bound", low, "quant_max_upper_bound", high
    low, high = given.scale_min_lower_bound, given.scale_max_upper_bound
    yield "scale_min_lower_bound", low, "scale_max_upper_bound", high


def _order(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    for lower, low, upper, high in _pairs(given):
        if low is not None and high is not None and low > high:
            message = f"{lower} {low} is above {upper} {high}: nothing is supported"
            yield place.find("error", "bounds-order", message, "swap the two bounds")
        elif low is not None and low == high and lower.startswith("quant"):
            message = f"{lower} and {upper} are both {low}: one value is nothing to quantize to"
            yield place.find("error", "bounds-order", message, "widen the bounds")


def _half_set(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    low, high = given.quant_min_lower_bound, given.quant_max_upper_bound
    if (low is None) != (high is None):
        lone, other = (
            ("quant_max_upper_bound", "quant_min_lower_bound")
            if low is None
            else ("quant_min_lower_bound", "quant_max_upper_bound")
        )
        message = f"{lone} is set without {other}; it is enforced alone (PyTorch ignores it)"
        yield place.find("note", "bounds-half-set", message, f"set {other} too")


def _reachable(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    bounds = {
        "quant_min_lower_bound": given.quant_min_lower_bound,
        "quant_max_upper_bound": given.quant_max_upper_bound,
    }
    limits = integer_range(given.dtype) or _largest(given.dtype)
    for name, bound in bounds.items():
        if bound is None:
            continue
        if limits is None:
            message = f"{name} has no effect on {given.dtype}"
            yield place.find("warning", "bounds-unreachable", message, f"remove {name}")
        elif not limits[0] <= bound <= limits[1]:
            yield _outside(name, bound, limits, place)
    low, high = given.scale_min_lower_bound, given.scale_max_upper_bound
    if high is not None and high <= 0:
        message = f"scale_max_upper_bound {high} admits no scale: scales are positive"
        yield place.find("error", "bounds-unreachable", message, "remove it, or set a positive one")
    if low is not None and low <= 0:
        message = f"scale_min_lower_bound {low} has no effect: scales are positive"
        yield place.find("warning", "bounds-unreachable", message, "remove scale_min_lower_bound")


def _largest(dtype: torch.dtype | None) -> tuple[float, float] | None:
    """The ends of a narrow float that has a scale: hardware may saturate before them."""
    if not is_scaled_float(dtype):
        return None
    row = find_dtype(dtype)
    return None if row is None else (row.low, row.high)


def _outside(name: str, bound: float, limits: tuple[float, float], place: Place) -> Finding:
    """A bound that the dtype cannot hold: beyond its near end it is idle, beyond the far end deadly."""
    holds = f"the dtype holds {limits[0]} to {limits[1]}"
    idle = bound < limits[0] if name == "quant_min_lower_bound" else bound > limits[1]
    if idle:
        message = f"{name} {bound} has no effect: {holds}"
        return place.find("warning", "bounds-unreachable", message, f"remove {name}")
    message = f"{name} {bound} admits nothing: {holds}"
    return place.find("error", "bounds-unreachable", message, "choose a bound that the dtype holds")


def _fixed(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    scale, zero_point = given.scale_exact_match, given.zero_point_exact_match
    if scale is not None and zero_point is None:
        message = "scale_exact_match is set without zero_point_exact_match; fixed qparams are both"
        yield place.find("error", "fixed-qparams", message, "set zero_point_exact_match too")
    if scale is not None:
        yield from _fixed_scale(given, scale, place)
    limits = integer_range(given.dtype)
    if zero_point is None or limits is None:
        return
    low = max(limits[0], _or(given.quant_min_lower_bound, limits[0]))
    high = min(limits[1], _or(given.quant_max_upper_bound, limits[1]))
    if not low <= zero_point <= high:
        message = f"zero_point_exact_match {zero_point} is outside of the range {low} to {high}"
        yield place.find("error", "fixed-qparams", message, f"choose one of {low} to {high}")


def _or(bound: float | None, default: float) -> float:
    return default if bound is None else bound


def _fixed_scale(given: DTypeWithConstraints, scale: float, place: Place) -> Iterator[Finding]:
    if not scale > 0:
        message = f"scale_exact_match {scale} is no scale: scales are positive"
        yield place.find("error", "fixed-qparams", message)
        return
    low, high = _or(given.scale_min_lower_bound, 0.0), _or(given.scale_max_upper_bound, math.inf)
    if low <= high and not low <= scale <= high:
        message = f"scale_exact_match {scale} is outside of the scale bounds {low} to {high}"
        yield place.find("error", "fixed-qparams", message, "widen the bounds, or remove them")
    if given.power_of_two_scale and not _is_power(scale):
        message = f"scale_exact_match {scale} is no power of two, as power_of_two_scale asks"
        yield place.find("error", "extended-constraints", message, "remove one of the two")


def _extended(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    rule = "extended-constraints"
    if given.granularity == "per_tensor" and given.ch_axis is not None:
        message = f"ch_axis {given.ch_axis} contradicts granularity per_tensor"
        yield place.find("error", rule, message, "remove ch_axis")
    if given.ch_axis is not None and (shared := given.granularity or "").startswith("per_channel"):
        named = Granularity.parse(shared).axis
        if named not in (None, given.ch_axis):
            message = f"ch_axis {given.ch_axis} contradicts granularity {shared}"
            yield place.find("error", rule, message, "remove one of the two")
    shared = "per_tensor" if given.granularity is None else given.granularity
    if shared != "per_tensor" and given.scale_exact_match is not None:
        words = Granularity.parse(shared).words.replace("per ", "one per ", 1)
        message = f"fixed qparams are one scale for the whole tensor, not {words}"
        yield place.find("error", rule, message, "remove granularity")
    if _no_power_of_two(given):
        message = "no power of two lies within the scale bounds, as power_of_two_scale asks"
        yield place.find("error", rule, message, "widen the bounds")
    yield from _domain(given, place)
    yield from _stored_scale(given, place)
    zero_point, limits = given.zero_point_exact_match, integer_range(given.dtype)
    if given.symmetric and zero_point is not None and limits is not None:
        middles = {0} if limits[0] < 0 else {(limits[1] + 1) // 2, limits[1] // 2}
        if zero_point not in middles:
            message = (
                f"zero_point_exact_match {zero_point} is not the middle that symmetric asks for"
            )
            yield place.find("error", rule, message, f"zero_point_exact_match: {max(middles)}")


def _domain(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    """Sets and ranges of scales."""
    rule = "scale-domain"
    if given.scale_exact_match is not None and (given.scales is not None or given.scale_range):
        message = "scale_exact_match leaves nothing to scales and scale_range"
        yield place.find("error", rule, message, "remove them")
    low, high = given.scale_range or (None, None)
    ends = [end for end in (low, high) if end is not None]
    if any(not end > 0 for end in ends) or (low is not None and high is not None and low > high):
        message = f"scale_range {[low, high]} is no range: scales are positive, the smaller first"
        yield place.at("scale_range").find("error", rule, message, "scale_range: [2**-16, 1]")
        return
    if given.scales is None:
        return
    here = place.at("scales")
    if not given.scales or any(not scale > 0 for scale in given.scales):
        what = "is empty" if not given.scales else "holds what is no scale: scales are positive"
        yield here.find("error", rule, f"the set of scales {what}", "scales: [2**-8, 2**-4, 1]")
        return
    bounds = (low, high), (given.scale_min_lower_bound, given.scale_max_upper_bound)
    left = [scale for scale in given.scales if not given.power_of_two_scale or _is_power(scale)]
    left = [s for s in left if all(_or(a, 0.0) <= s <= _or(b, math.inf) for a, b in bounds)]
    if not left:
        message = "none of the set is left by power_of_two_scale, scale_range and the bounds"
        yield here.find("error", rule, message, "remove one of them")
    elif len(left) < len(given.scales):
        outside = ", ".join(f"{s:g}" for s in given.scales if s not in left)
        message = (
            f"{outside} cannot be taken: power_of_two_scale, scale_range or a bound excludes it"
        )
        yield here.find("warning", rule, message, "remove it from the set")


def _stored_scale(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    """``scale_dtype``: E8M0 holds powers of two; E4M3 stands beside a scale for the tensor; others round."""
    if given.scale_dtype is None:
        return
    here, rule = place.at("scale_dtype"), "scale-domain"
    known = (
        torch.float8_e8m0fnu,
        torch.float8_e4m3fn,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
    if given.scale_dtype not in known:
        message = f"scales are not stored in {given.scale_dtype}"
        yield here.find(
            "error", rule, message, "float8_e8m0fnu, float8_e4m3fn, float16 or bfloat16"
        )
    elif given.scale_exact_match is not None or given.scales is not None:
        message = "scale_dtype leaves nothing to scale_exact_match and scales"
        yield here.find("error", rule, message, "remove one of them")
    elif given.scale_dtype is torch.float8_e4m3fn and (
        given.granularity is None or not Granularity.parse(given.granularity).has_blocks
    ):
        message = "scales in float8_e4m3fn, beside one of the tensor, are those of groups or blocks"
        yield here.find("error", rule, message, "granularity: per_group(size=16)")


def _is_power(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


def _no_power_of_two(given: DTypeWithConstraints) -> bool:
    low, high = given.scale_min_lower_bound, given.scale_max_upper_bound
    if not given.power_of_two_scale or low is None or high is None or not 0 < low <= high:
        return False
    return math.ldexp(1.0, math.ceil(math.log2(low))) > high
