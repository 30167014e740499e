"""Constraints on scales and zero points: what a request says of them, and what only measured ones can tell.

PyTorch never looks at the upper bound of the scale, and compares fixed qparams only when both are given; here
each is enforced on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from backquant.backend_config import DTypeWithConstraints
from backquant.backend_config.checks import short_text
from backquant.backend_config.describe import bias_step_text, ratio_text, scales_text
from backquant.backend_config.dtypes import Ratio
from backquant.dtypes import is_scaled_float, qdtype
from backquant.match.plan import TensorRequest
from backquant.match.refusal import Refusal, Rule
from backquant.reason_codes import ReasonCode


def scale_at_least(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """The smallest scale that the observer gives (its ``eps``) is no less than demanded.

    >>> request = TensorRequest(torch.qint8, "MinMaxObserver", eps=2**-23)
    >>> scale_at_least(request, DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-12)).asked
    'scale ≥ 2**-23 (eps)'
    """
    bound = demand.scale_min_lower_bound
    if bound is None:
        return None
    smallest = request.scale if request.is_fixed else request.eps
    if smallest is not None and smallest >= bound:
        return None
    asked = (
        f"{request.observer} with no eps"
        if smallest is None
        else f"scale {short_text(smallest)}"
        if request.is_fixed
        else f"scale ≥ {short_text(smallest)} (eps)"
    )
    return Refusal(ReasonCode.SCALE_MIN, asked, f"scale ≥ {short_text(float(bound))}")


def scale_at_most(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """A fixed scale, or the smallest possible one, is no more than demanded.

    Measured scales are checked after calibration.

    >>> request = TensorRequest(torch.quint8, "FixedQParamsObserver", scale=0.5, zero_point=0)
    >>> scale_at_most(request, DTypeWithConstraints(torch.quint8, scale_max_upper_bound=0.1)).rule
    'scale-max'
    """
    bound = demand.scale_max_upper_bound
    smallest = request.scale if request.is_fixed else request.eps
    if bound is None or smallest is None or smallest <= bound:
        return None
    return Refusal(
        ReasonCode.SCALE_MAX,
        f"scale ≥ {short_text(smallest)}",
        f"scale ≤ {short_text(float(bound))}",
    )


def fixed_qparams(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """Scale and zero point are fixed to the demanded values. Float dtypes have none.

    >>> demand = DTypeWithConstraints(torch.quint8, scale_exact_match=1/256, zero_point_exact_match=0)
    >>> fixed_qparams(TensorRequest(torch.quint8, "HistogramObserver"), demand).admitted
    'fixed scale 2**-8, zero point 0'
    """
    scale, zero_point = demand.scale_exact_match, demand.zero_point_exact_match
    if (scale is None and zero_point is None) or _has_no_scale(request.dtype):
        return None
    if scale is None and not request.is_fixed:
        return None  # measured scales: conversion computes them for this zero point
    wrong_scale = scale is not None and not _same_float(request.scale, scale)
    wrong_zero = zero_point is not None and request.zero_point != zero_point
    if request.is_fixed and not wrong_scale and not wrong_zero:
        return None
    parts = [] if scale is None else [f"scale {short_text(scale)}"]
    parts += [] if zero_point is None else [f"zero point {zero_point}"]
    asked = (
        f"fixed scale {short_text(request.scale)}, zero point {request.zero_point}"
        if request.scale is not None
        else f"measured by {request.observer}"
    )
    return Refusal(ReasonCode.FIXED_QPARAMS, asked, "fixed " + ", ".join(parts))


def _has_no_scale(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and not is_scaled_float(dtype)


def _same_float(asked: float | None, demanded: float) -> bool:
    """Observers keep scales in float32."""
    return asked is not None and (
        asked == demanded or asked == torch.tensor(demanded, dtype=torch.float32).item()
    )


def power_of_two(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """A fixed scale is a power of two. Measured scales are checked after calibration.

    >>> request = TensorRequest(torch.quint8, "FixedQParamsObserver", scale=0.3, zero_point=0)
    >>> power_of_two(request, DTypeWithConstraints(torch.quint8, power_of_two_scale=True)).asked
    'scale 0.3'
    """
    if not demand.power_of_two_scale or request.scale is None or is_power_of_two(request.scale):
        return None
    return Refusal(
        ReasonCode.POWER_OF_TWO_SCALE,
        f"scale {short_text(request.scale)}",
        "scale that is a power of two",
    )


def is_power_of_two(scale: float) -> bool:
    """Whether ``scale`` is a power of two, fractions included.

    >>> is_power_of_two(2**-7), is_power_of_two(0.3)
    (True, False)
    """
    return scale > 0 and math.frexp(scale)[0] == 0.5


def scale_of_the_set(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """A fixed scale is one that the hardware has. Measured scales become one.

    >>> request = TensorRequest(torch.quint8, "FixedQParamsObserver", scale=0.3, zero_point=0)
    >>> scale_of_the_set(request, DTypeWithConstraints(torch.quint8, scales=(0.25, 1.0))).admitted
    'scale one of 0.25, 1'
    """
    if request.scale is None:
        return None
    low, high = demand.scale_range or (None, None)
    inside = (low is None or request.scale >= low) and (high is None or request.scale <= high)
    if inside and (
        demand.scales is None or any(_same_float(request.scale, s) for s in demand.scales)
    ):
        return None
    return Refusal(ReasonCode.SCALE_SET, f"scale {short_text(request.scale)}", scales_text(demand))


#: In the order in which they are reported.
SCALE_RULES: tuple[Rule, ...] = (
    scale_at_least,
    scale_at_most,
    fixed_qparams,
    power_of_two,
    scale_of_the_set,
)


@dataclass(frozen=True)
class ScaleDemand:
    """A constraint on the measured scales of one tensor (``role``); ``admitted`` says it in words."""

    role: str
    rule: ReasonCode
    bound: float | None
    admitted: str


def scale_demands(
    role: str, request: TensorRequest, demand: DTypeWithConstraints
) -> Iterator[ScaleDemand]:
    """What only measured scales can answer of a demand on the tensor of a role.

    >>> found = scale_demands("input", TensorRequest(torch.qint8, "MinMaxObserver"),
    ...                       DTypeWithConstraints(torch.qint8, scale_max_upper_bound=0.5))
    >>> [(one.bound, one.admitted) for one in found]
    [(0.5, 'scale ≤ 0.5')]
    """
    if (
        request.is_fixed
        or request.is_dynamic
        or _has_no_scale(request.dtype)
        or demand.dtype is None
    ):
        return
    bound = demand.scale_max_upper_bound
    if bound is not None:
        admitted = f"scale ≤ {short_text(float(bound))}"
        yield ScaleDemand(role, ReasonCode.SCALE_MAX, float(bound), admitted)
    if demand.power_of_two_scale:
        yield ScaleDemand(role, ReasonCode.POWER_OF_TWO_SCALE, None, "scale that is a power of two")
    if demand.scales:
        largest = max(demand.scales)
        yield ScaleDemand(role, ReasonCode.SCALE_SET, largest, scales_text(demand))
    one_sided = _one_sided(request, demand)
    if one_sided is not None:
        admitted = f"zero point {demand.zero_point_exact_match}, {one_sided[1]}"
        yield ScaleDemand(role, ReasonCode.ZERO_POINT, one_sided[0], admitted)


def ratio_demands(ratio: Ratio) -> Iterator[ScaleDemand]:
    """Constraints on input scale × weight scale / output scale.

    >>> [demand.bound for demand in ratio_demands((2**-8, 1.0))]
    [-0.00390625, 1.0]
    """
    rule, admitted = ReasonCode.REQUANTIZATION_RATIO, ratio_text(ratio)
    if ratio == "power_of_two":
        yield ScaleDemand("ratio", rule, None, admitted)
        return
    low, high = ratio
    if low is not None:
        yield ScaleDemand("ratio", rule, -low, admitted)
    if high is not None:
        yield ScaleDemand("ratio", rule, high, admitted)


def bias_step_demand(bound: float) -> ScaleDemand:
    """The constraint on the step of the bias (input × weight scale), counted in steps of the output.

    >>> bias_step_demand(1.0).admitted
    'a bias beside input × weight / output scale ≤ 1'
    """
    return ScaleDemand("bias step", ReasonCode.BIAS_STEP, bound, bias_step_text(bound))


def _one_sided(request: TensorRequest, demand: DTypeWithConstraints) -> tuple[float, str] | None:
    """The sign of the values that can be represented with a fixed zero point at one end, and the same in
    words."""
    zero_point = demand.zero_point_exact_match
    if zero_point is None or demand.scale_exact_match is not None:
        return None
    row = qdtype(request.dtype)
    low = row.low if request.quant_min is None else request.quant_min
    high = row.high if request.quant_max is None else request.quant_max
    if zero_point <= low:
        return 1.0, "no value below 0"
    return (-1.0, "no value above 0") if zero_point >= high else None
