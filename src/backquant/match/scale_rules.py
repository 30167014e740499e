"""Constraints on scales and zero points: what a request says of them, and what only measured ones can tell.

PyTorch never looks at the upper bound of the scale, and compares fixed qparams only when both are given; here
each is enforced on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from backquant.backend_config import BackendConfig, DTypeWithConstraints, LeaveFloat
from backquant.backend_config.checks import short_text
from backquant.backend_config.describe import bias_step_text, ratio_text, scales_text
from backquant.backend_config.dtypes import Ratio
from backquant.dtypes import (
    Granularity,
    QParams,
    block_of,
    dequantize_tensor,
    integer_range,
    is_scaled_float,
    qdtype,
    quantize_tensor,
)
from backquant.graph import GraphIndex, OperatorKey
from backquant.match.float_places import calls_one_of, keys_of
from backquant.match.matcher import key_of
from backquant.match.plan import Plan, Predicate, Reason, TensorRequest
from backquant.match.refusal import Refusal, Rule
from backquant.operators.index import find
from backquant.qconfig import QConfig
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


def bias_range_demand(dtype: torch.dtype | None) -> ScaleDemand:
    """The constraint on the integers of the bias.

    >>> bias_range_demand(torch.int8).admitted
    'a bias of at most 127 steps'
    """
    high = bias_limit(dtype)
    return ScaleDemand("bias", ReasonCode.BIAS_RANGE, high, f"a bias of at most {high:.0f} steps")


def bias_limit(dtype: torch.dtype | None) -> float:
    """The largest integer of a bias: half of the range where the sums that it is added to have as many bits.
    Of 64 bits accelerators have 40; where a description says nothing, there are 32.

    >>> bias_limit(torch.int8), bias_limit(torch.int32) == bias_limit(None) == 2**30 - 1
    (127.0, True)
    """
    if dtype == torch.int64:
        return float((1 << 38) - 1)
    high = (integer_range(dtype) or integer_range(torch.int32) or (0, 0))[1]
    return float(high if high < 1 << 30 else high >> 1)


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


# Checks of the plan after calibration: constraints on measured scales, and outputs that stay float.
#
# PyTorch quantizes the output of every quantized operator. Where only a float operator reads it (a residual
# addition, attention), that costs accuracy and a conversion, and saves nothing if the kernel can also return
# floats. A backend names such operators by rules (``LeaveFloat``, ``results``), which are applied to the
# final plan.


# Scales are float32, so bounds are compared with a relative tolerance.
_SLACK = 1 + 2**-20


@dataclass(frozen=True)
class MeasuredScales:
    """The scales of the tensors that play one role at one match.

    ``node`` is the anchor of the match; ``role`` is ``"input"``, ``"output"`` or ``"weight"``;
    ``scales`` holds one number per tensor or per channel; ``ranges`` the smallest and the largest value
    that was measured, in steps of the scale, for each.
    """

    node: str
    role: str
    scales: tuple[float, ...]
    ranges: tuple[tuple[float, float], ...] = ()


def recheck(plan: Plan, measured: Iterable[MeasuredScales]) -> Plan:
    """The plan with those matches in float whose measured scales violate a constraint of the backend.

    Tensors that were not measured are not checked.

    >>> recheck(Plan("x86"), [MeasuredScales("conv", "output", (0.1,))]) == Plan("x86")
    True
    """
    by_role = {(item.node, item.role): item for item in measured}
    known = ((p, by_role.get((p.node, p.role))) for p in plan.predicates)
    found = (_broken(p, item) for p, item in known if item is not None)
    return plan.refuse(reason for reason in found if reason is not None)


def _broken(predicate: Predicate, found: MeasuredScales) -> Reason | None:
    bound = predicate.bound
    if predicate.rule == ReasonCode.ZERO_POINT:
        asked = _wrong_side(found, bound or 0.0)
    elif predicate.rule == ReasonCode.REQUANTIZATION_RATIO:
        asked = _wrong_ratio(found, bound)
    elif predicate.rule == ReasonCode.BIAS_STEP:
        asked = _coarse_bias(found, bound or 0.0)
    elif predicate.rule == ReasonCode.BIAS_RANGE:
        largest = max(found.scales)
        asked = f"a bias of {largest:.0f} steps" if largest > (bound or 0.0) else ""
    elif predicate.rule in (ReasonCode.SCALE_MAX, ReasonCode.SCALE_SET):
        asked = _largest(s for s in found.scales if bound is not None and s > bound * _SLACK)
    else:
        asked = _largest(scale for scale in found.scales if not is_power_of_two(scale))
    if not asked:
        return None
    return Reason(
        node=predicate.node,
        rule=predicate.rule,
        asked=f"{_named(predicate, asked)}, as measured",
        admitted=_named(predicate, predicate.admitted),
        place=predicate.place,
    )


def _named(predicate: Predicate, text: str) -> str:
    return text if predicate.role in ("ratio", "bias step", "bias") else f"{predicate.role} {text}"


def _wrong_ratio(found: MeasuredScales, bound: float | None) -> str:
    if bound is None:
        wrong = [r for r in found.scales if abs(math.remainder(math.log2(r), 1.0)) > _SLACK - 1]
    elif bound < 0:
        wrong = [ratio for ratio in found.scales if ratio * _SLACK < -bound]
    else:
        wrong = [ratio for ratio in found.scales if ratio > bound * _SLACK]
    return f"input × weight / output scale {short_text(wrong[0])}" if wrong else ""


def _coarse_bias(found: MeasuredScales, bound: float) -> str:
    largest = max(found.scales)
    of_which = f"a bias beside input × weight / output scale {short_text(largest)}"
    return of_which if largest > bound else ""


def _largest(wrong: Iterable[float]) -> str:
    largest = max(wrong, default=None)
    return "" if largest is None else f"scale {short_text(largest)}"


def _wrong_side(found: MeasuredScales, sign: float) -> str:
    """Measured values that the zero point leaves no integers for (below it, say), by more than half a
    step."""
    for (low, high), scale in zip(
        found.ranges, found.scales, strict=False
    ):  # shorter for weights, which have no ranges
        if (-low if sign > 0 else high) > 0.5:
            return f"values from {low * scale:.3g} to {high * scale:.3g}"
    return ""


def float_results(
    plan: Plan, graph: GraphIndex, backend: BackendConfig, rules: Iterable[LeaveFloat]
) -> frozenset[str]:
    """Anchors of the matches whose outputs ``rules`` leave in float, if no quantized operator reads them."""
    keys = keys_of(operator for rule in rules if rule.results for operator in rule.operators)
    if not keys:
        return frozenset()
    return frozenset(
        match.anchor
        for match in plan.matches
        if match.entry >= 0
        and (
            key_of(backend.shared_configs[match.entry].normal_pattern.nodes[0]) in keys
            or _is_fused(graph, graph.nodes[match.nodes[0]], keys)
        )
    )


def _is_fused(graph: GraphIndex, node: fx.Node, keys: set[OperatorKey | None]) -> bool:
    """Whether a module is a fused or QAT form of one; not if a second activation enters it."""
    return len(node.args) + len(node.kwargs) == 1 and calls_one_of(graph, node, keys)


def only_moves(graph: GraphIndex, node: fx.Node) -> bool:
    """Whether a node only moves the values of its one input.

    >>> gm = fx.symbolic_trace(lambda x: x.view(-1))
    >>> only_moves(GraphIndex(gm), list(gm.graph.nodes)[1])
    True
    """
    key = graph.key(node)
    known = None if key is None else find(key.op)
    one = len(node.all_input_nodes) == 1 or node.op == "call_method"
    return known is not None and known.family == "shape" and known.shares_qparams and one


# Sums of absolute quantized weights: what an accumulator has to hold, per output channel.


@dataclass(frozen=True)
class WeightSums:
    """Quantizes a weight as a QConfig asks, and sums each channel.

    >>> from backquant.observe import MinMaxObserver
    >>> asked = QConfig(None, MinMaxObserver.with_args(
    ...     dtype=torch.qint8, qscheme=torch.per_tensor_symmetric, quant_min=-127, quant_max=127))
    >>> WeightSums(asked)(torch.tensor([[1.0, -1.0], [0.5, 0.0]]), 0)
    (254, 64)
    """

    qconfig: QConfig | None

    def __call__(self, weight: Tensor, axis: int) -> tuple[Any, ...] | None:
        """The sum of each channel on ``axis``; ``None`` where no integers are asked for."""
        if self.qconfig is None or self.qconfig.weight is None:
            return None
        observer = self.qconfig.weight()
        limits = integer_range(getattr(observer, "dtype", None))
        if limits is None:
            return None
        shared = getattr(observer, "granularity", "")
        if shared and Granularity.parse(shared).undivided(weight.shape) is not None:
            return None
        with torch.no_grad():
            observer(weight.detach())
            scale, zero_point = observer.calculate_qparams()
        measured = getattr(observer, "activation_post_process", observer)
        if scale.dim() > 1:
            return _of_blocks(weight.detach(), (scale, zero_point), measured, axis)
        along = getattr(measured, "ch_axis", 0)
        shape = [1] * weight.dim()
        shape[along if scale.numel() > 1 else 0] = -1
        low = limits[0] if measured.quant_min is None else measured.quant_min
        high = limits[1] if measured.quant_max is None else measured.quant_max
        steps = torch.round(weight.detach() / scale.view(shape)) + zero_point.view(shape)
        distance = (steps.clamp(low, high) - zero_point.view(shape)).abs().double()
        others = [a for a in range(weight.dim()) if a != axis]
        return tuple(int(total) for total in distance.sum(dim=others))


def _of_blocks(
    weight: Tensor, qparams: tuple[Tensor, Tensor], measured: Any, axis: int
) -> tuple[Any, ...]:
    scale, zero_point = qparams
    block = block_of(weight.shape, scale.shape)
    ends = measured.quant_min, measured.quant_max
    q = quantize_tensor(weight, QParams(scale, zero_point, *ends, measured.dtype, block=block))
    distance = dequantize_tensor(q, torch.ones_like(scale), zero_point, block=block).abs().double()
    others = [a for a in range(weight.dim()) if a != axis]
    return tuple(int(total) for total in distance.sum(dim=others))
