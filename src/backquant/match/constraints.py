"""Constraints against requests: one function per rule, each pure.

Every rule takes what is asked and what the backend demands of one tensor and returns a ``Refusal``,
or ``None`` when there is nothing to refuse. A demand that is not set refuses nothing.

PyTorch checks a range only when both of its bounds are set, never looks at the upper bound of the
scale, and compares fixed qparams only when both are given; here each is enforced on its own.
"""

# size: one function a rule
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from backquant.backend_config import DTypeWithConstraints
from backquant.backend_config.numbers import short_text
from backquant.dtypes import (
    Granularity,
    dtype_name,
    integer_range,
    is_scaled_float,
    plain_dtype,
    qdtype,
)
from backquant.errors import SpecError
from backquant.match.plan import TensorRequest
from backquant.reason_codes import ReasonCode

__all__ = [
    "RULES",
    "Refusal",
    "ScaleDemand",
    "check_tensor",
    "demand_text",
    "divides",
    "request_text",
    "scale_demands",
]


@dataclass(frozen=True)
class Refusal:
    """One rule that is broken."""

    rule: ReasonCode
    asked: str
    admitted: str
    fix: str = ""


Rule = Callable[[TensorRequest, DTypeWithConstraints], "Refusal | None"]


def dtype_matches(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """The dtype is the demanded token.

    >>> refusal = dtype_matches(TensorRequest(torch.uint8, "MinMaxObserver"),
    ...                         DTypeWithConstraints(torch.quint8))
    >>> refusal.rule, refusal.admitted
    ('dtype-token', 'quint8')
    """
    if demand.dtype is None or request.dtype == demand.dtype:
        return None
    # tokens of one storage are compared literally: the reason says that only they differ
    rule = (
        ReasonCode.DTYPE_TOKEN
        if plain_dtype(request.dtype) == plain_dtype(demand.dtype)
        and integer_range(request.dtype) == integer_range(demand.dtype)
        else ReasonCode.DTYPE
    )
    return Refusal(rule, dtype_name(request.dtype), dtype_name(demand.dtype))


def range_within(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """The quantized range lies within the demanded one; each bound counts on its own.

    >>> request = TensorRequest(torch.qint8, "MinMaxObserver", quant_min=-128, quant_max=127)
    >>> range_within(request, DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-127)).admitted
    '[-127, …]'
    """
    low, high = demand.quant_min_lower_bound, demand.quant_max_upper_bound
    admitted = _interval(low, high)
    lower, upper = request.quant_min, request.quant_max
    if (low is not None and lower is None) or (high is not None and upper is None):
        unknown = f"{request.observer} with no quant_min and quant_max"
        return Refusal(ReasonCode.QUANT_RANGE, unknown, admitted)
    below = low is not None and lower is not None and lower < low
    above = high is not None and upper is not None and upper > high
    if below or above:
        return Refusal(ReasonCode.QUANT_RANGE, _interval(lower, upper), admitted)
    return None


def _interval(low: float | None, high: float | None) -> str:
    ends = ("…" if end is None else f"{end:g}" for end in (low, high))
    return f"[{', '.join(ends)}]"


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
        return None  # measured scales are moved to this zero point
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


def symmetry(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """The scheme is symmetric, or affine, as demanded.

    >>> request = TensorRequest(torch.qint8, "MinMaxObserver", qscheme="per_tensor_affine")
    >>> symmetry(request, DTypeWithConstraints(torch.qint8, symmetric=True)).admitted
    'a symmetric scheme'
    """
    if demand.symmetric is None or request.is_symmetric is demand.symmetric:
        return None
    wanted = "a symmetric scheme" if demand.symmetric else "an affine scheme"
    return Refusal(ReasonCode.SYMMETRIC, _scheme(request), wanted)


def granularity(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """One scale is for what is demanded; without a demand, for a tensor or a channel.

    >>> request = TensorRequest(torch.qint8, "PerChannelMinMaxObserver", qscheme="per_channel_symmetric")
    >>> granularity(request, DTypeWithConstraints(torch.qint8, granularity="per_tensor")).asked
    'per_channel_symmetric'
    """
    if demand.granularity is None:
        if not request.granularity:
            return None
        wanted = "per tensor or per channel"
    else:
        admitted = Granularity.parse(demand.granularity)
        if admitted.admits(request.shared_over):
            return None
        wanted = admitted.words
    asked = request.shared_over.words if request.granularity else request.qscheme
    return Refusal(ReasonCode.GRANULARITY, asked or f"{request.observer} with no scheme", wanted)


def divides(
    request: TensorRequest, shape: Sequence[int], axes: Sequence[str] = ()
) -> Refusal | None:
    """The groups or blocks that are asked for divide a weight of this shape; ``axes`` names its axes.

    >>> request = TensorRequest(torch.int4, "O", granularity="per_group(size=128)")
    >>> refusal = divides(request, (8, 100), ("out_features", "in_features"))
    >>> refusal.asked, refusal.fix
    ('group size 128, in_features 100', 'group size 100 in place of 128')
    """
    shared = request.shared_over
    if not shared.has_blocks or not shape:
        return None
    names = dict(enumerate(axes))
    size = "group size" if shared.kind == "per_group" else "block size"
    try:
        wrong = shared.undivided(shape)
    except SpecError:
        asked = f"{shared.words} of a weight {list(shape)}"
        return Refusal(ReasonCode.GROUP_SIZE, asked, "a grid over the axes that the weight has")
    if wrong is None:
        return None
    axis = names.get(wrong.axis, f"axis {wrong.axis}")
    return Refusal(
        ReasonCode.GROUP_SIZE,
        f"{size} {wrong.size}, {axis} {wrong.length}",
        f"a {size} that divides {axis}",
        f"{size} {wrong.nearest} in place of {wrong.size}",
    )


def _scheme(request: TensorRequest) -> str:
    return request.qscheme or f"{request.observer} with no scheme"


def channel_axis(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """Per channel, the channels lie on the demanded axis.

    >>> request = TensorRequest(torch.qint8, "O", qscheme="per_channel_symmetric", ch_axis=0)
    >>> channel_axis(request, DTypeWithConstraints(torch.qint8, ch_axis=1)).admitted
    'channels on axis 1'
    """
    if demand.ch_axis is None or not request.is_per_channel or request.ch_axis == demand.ch_axis:
        return None
    return Refusal(
        ReasonCode.CH_AXIS,
        *(f"channels on axis {axis}" for axis in (request.ch_axis, demand.ch_axis)),
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
    return Refusal(ReasonCode.SCALE_SET, f"scale {short_text(request.scale)}", domain_text(demand))


def domain_text(demand: DTypeWithConstraints) -> str:
    """The scales that a demand leaves, in words.

    >>> domain_text(DTypeWithConstraints(torch.quint8, scale_range=(2**-8, None)))
    'scale in [2**-8, …]'
    """
    if demand.scales is not None:
        return f"scale one of {', '.join(map(short_text, demand.scales))}"
    ends = ("…" if end is None else short_text(end) for end in demand.scale_range or ())
    return f"scale in [{', '.join(ends)}]"


#: In the order in which they are reported. Rules after the first say nothing about another dtype.
RULES: tuple[Rule, ...] = (
    range_within,
    scale_at_least,
    scale_at_most,
    fixed_qparams,
    symmetry,
    granularity,
    channel_axis,
    power_of_two,
    scale_of_the_set,
)


def check_tensor(request: TensorRequest, demand: DTypeWithConstraints) -> list[Refusal]:
    """Every rule that a request breaks; a demand without a dtype demands nothing.

    >>> check_tensor(TensorRequest(torch.qint8, "MinMaxObserver"), DTypeWithConstraints(torch.qint8))
    []
    """
    if demand.dtype is None:
        return []
    wrong = dtype_matches(request, demand)
    if wrong is not None:
        return [wrong]
    found = (rule(request, demand) for rule in RULES)
    return [refusal for refusal in found if refusal is not None]


@dataclass(frozen=True)
class ScaleDemand:
    """What the measured scales of the tensor of a ``role`` have to satisfy; ``admitted``: in words."""

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
        yield ScaleDemand(role, ReasonCode.SCALE_SET, largest, domain_text(demand))
    one_sided = _one_sided(request, demand)
    if one_sided is not None:
        admitted = f"zero point {demand.zero_point_exact_match}, {one_sided[1]}"
        yield ScaleDemand(role, ReasonCode.ZERO_POINT, one_sided[0], admitted)


def _one_sided(request: TensorRequest, demand: DTypeWithConstraints) -> tuple[float, str] | None:
    """The sign of the only values that a fixed zero point leaves room for, and that in words."""
    zero_point = demand.zero_point_exact_match
    if zero_point is None or demand.scale_exact_match is not None:
        return None
    row = qdtype(request.dtype)
    low = row.low if request.quant_min is None else request.quant_min
    high = row.high if request.quant_max is None else request.quant_max
    if zero_point <= low:
        return 1.0, "no value below 0"
    return (-1.0, "no value above 0") if zero_point >= high else None


def demand_text(demand: DTypeWithConstraints) -> str:
    """A demand in words.

    >>> demand_text(DTypeWithConstraints(torch.qint8, -127, 127, scale_min_lower_bound=2**-12))
    'qint8 [-127, 127], scale ≥ 2**-12'
    """
    text = dtype_name(demand.dtype)
    low, high = demand.quant_min_lower_bound, demand.quant_max_upper_bound
    if low is not None or high is not None:
        text += f" {_interval(low, high)}"
    parts = []
    if demand.scale_min_lower_bound is not None:
        parts.append(f"scale ≥ {short_text(float(demand.scale_min_lower_bound))}")
    if demand.scale_max_upper_bound is not None:
        parts.append(f"scale ≤ {short_text(float(demand.scale_max_upper_bound))}")
    if demand.scale_exact_match is not None:
        parts.append(f"scale = {short_text(demand.scale_exact_match)}")
    if demand.zero_point_exact_match is not None:
        parts.append(f"zero point = {demand.zero_point_exact_match}")
    if demand.symmetric is not None:
        parts.append(ReasonCode.SYMMETRIC if demand.symmetric else "affine")
    if demand.granularity is not None:
        parts.append(Granularity.parse(demand.granularity).words)
    if demand.ch_axis is not None:
        parts.append(f"channels on axis {demand.ch_axis}")
    if demand.power_of_two_scale:
        parts.append("power-of-two scale")
    if demand.scales is not None or demand.scale_range is not None:
        parts.append(domain_text(demand))
    return ", ".join([text, *parts])


def request_text(request: TensorRequest) -> str:
    """A request in words.

    >>> request_text(TensorRequest(torch.qint8, "MinMaxObserver", quant_min=-128, quant_max=127))
    'qint8 [-128, 127]'
    """
    text = dtype_name(request.dtype)
    if request.quant_min is not None or request.quant_max is not None:
        text += f" {_interval(request.quant_min, request.quant_max)}"
    return f"{text}, {request.shared_over.words}" if request.granularity else text
