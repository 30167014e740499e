"""Each rule on its own: what it admits, what it refuses, and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backquant.backend_config import DTypeWithConstraints
from backquant.backend_config.describe import describe_dtype
from backquant.match.constraints import check_tensor
from backquant.match.plan import TensorRequest
from backquant.match.scale_rules import scale_demands

INT8 = TensorRequest(
    torch.qint8, "MinMaxObserver", "per_tensor_affine", quant_min=-128, quant_max=127, eps=2**-23
)
FIXED = replace(INT8, scale=0.25, zero_point=3, observer="FixedQParamsObserver", eps=None)
CHANNELS = replace(INT8, qscheme="per_channel_symmetric", ch_axis=0)

CASES = [
    ("quant-range", INT8, {"quant_min_lower_bound": -128}, {"quant_min_lower_bound": -127}),
    ("quant-range", INT8, {"quant_max_upper_bound": 127}, {"quant_max_upper_bound": 126}),
    (
        "quant-range",
        INT8,
        {"quant_min_lower_bound": -128, "quant_max_upper_bound": 127},
        {"quant_min_lower_bound": -200, "quant_max_upper_bound": 100},
    ),
    ("scale-min", INT8, {"scale_min_lower_bound": 2**-23}, {"scale_min_lower_bound": 2**-12}),
    ("scale-min", FIXED, {"scale_min_lower_bound": 0.25}, {"scale_min_lower_bound": 0.5}),
    ("scale-max", FIXED, {"scale_max_upper_bound": 0.25}, {"scale_max_upper_bound": 0.2}),
    ("scale-max", INT8, {"scale_max_upper_bound": 0.1}, {"scale_max_upper_bound": 2**-30}),
    ("fixed-qparams", FIXED, {"scale_exact_match": 0.25}, {"scale_exact_match": 0.3}),
    ("fixed-qparams", FIXED, {"zero_point_exact_match": 3}, {"zero_point_exact_match": 0}),
    (
        "fixed-qparams",
        FIXED,
        {"scale_exact_match": 0.25, "zero_point_exact_match": 3},
        {"scale_exact_match": 0.25, "zero_point_exact_match": 4},
    ),
    ("symmetric", INT8, {"symmetric": False}, {"symmetric": True}),
    ("symmetric", CHANNELS, {"symmetric": True}, {"symmetric": False}),
    ("granularity", INT8, {"granularity": "per_tensor"}, {"granularity": "per_channel"}),
    ("granularity", CHANNELS, {"granularity": "per_channel"}, {"granularity": "per_tensor"}),
    ("ch-axis", CHANNELS, {"ch_axis": 0}, {"ch_axis": 1}),
    ("power-of-two-scale", FIXED, {"power_of_two_scale": True}, None),
    ("power-of-two-scale", replace(FIXED, scale=0.3), None, {"power_of_two_scale": True}),
]


@pytest.mark.parametrize(("rule", "ask", "admits", "refuses"), CASES)
def test_rule(rule: str, ask: TensorRequest, admits: dict | None, refuses: dict | None) -> None:
    if admits is not None:
        assert check_tensor(ask, DTypeWithConstraints(torch.qint8, **admits)) == []
    if refuses is not None:
        demand = DTypeWithConstraints(torch.qint8, **refuses)
        (refusal,) = check_tensor(ask, demand)
        assert refusal.rule == rule
        assert refusal.asked
        assert refusal.admitted


def test_a_demand_without_a_dtype_demands_nothing() -> None:
    assert check_tensor(INT8, DTypeWithConstraints(quant_min_lower_bound=0)) == []


def test_fixed_scales_are_compared_in_float32() -> None:
    third = torch.tensor(1 / 3, dtype=torch.float32).item()
    demand = DTypeWithConstraints(torch.qint8, scale_exact_match=1 / 3)
    assert check_tensor(replace(FIXED, scale=third), demand) == []


def test_measured_observer_is_refused_where_qparams_are_fixed() -> None:
    demand = DTypeWithConstraints(torch.qint8, scale_exact_match=0.25, zero_point_exact_match=3)
    (refusal,) = check_tensor(INT8, demand)
    assert (refusal.rule, refusal.asked) == ("fixed-qparams", "measured by MinMaxObserver")


@pytest.mark.parametrize(
    ("asked", "wanted", "rule"),
    [
        (torch.uint8, torch.quint8, "dtype-token"),
        (torch.qint8, torch.int8, "dtype-token"),
        (torch.qint32, torch.int32, "dtype-token"),
        (torch.int8, torch.quint8, "dtype"),
        (torch.int16, torch.qint8, "dtype"),
        (torch.float16, torch.quint8, "dtype"),
    ],
)
def test_dtypes_are_compared_as_tokens(asked: torch.dtype, wanted: torch.dtype, rule: str) -> None:
    (refusal,) = check_tensor(replace(INT8, dtype=asked), DTypeWithConstraints(wanted))
    assert refusal.rule == rule


def test_unknown_range_and_eps_are_refused() -> None:
    vague = TensorRequest(torch.qint8, "Mine")
    demand = DTypeWithConstraints(
        torch.qint8, quant_min_lower_bound=-127, scale_min_lower_bound=2**-12
    )
    refusals = check_tensor(vague, demand)
    assert [r.asked for r in refusals] == [
        "Mine with no quant_min and quant_max",
        "Mine with no eps",
    ]


def test_every_demand_is_written_out() -> None:
    demand = DTypeWithConstraints(
        torch.qint8,
        quant_min_lower_bound=-127,
        scale_min_lower_bound=2**-12,
        scale_max_upper_bound=0.5,
        scale_exact_match=0.25,
        zero_point_exact_match=0,
        symmetric=True,
        granularity="per_channel",
        ch_axis=1,
        power_of_two_scale=True,
    )
    assert describe_dtype(demand) == (
        "qint8 [-127, …], scale ≥ 2**-12, scale ≤ 0.5, scale = 0.25, zero point = 0, symmetric, "
        "per channel, channels on axis 1, power-of-two scale"
    )


def test_only_measured_integers_are_checked_again() -> None:
    demand = DTypeWithConstraints(torch.qint8, scale_max_upper_bound=0.5, power_of_two_scale=True)
    assert [one.rule for one in scale_demands("input", INT8, demand)] == [
        "scale-max",
        "power-of-two-scale",
    ]
    for ask in (
        FIXED,
        replace(INT8, is_dynamic=True),
        replace(INT8, dtype=torch.float16),
    ):
        assert not list(scale_demands("input", ask, demand))
