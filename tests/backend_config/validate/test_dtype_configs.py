from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backquant.backend_config import DTypeConfig, DTypeWithConstraints
from backquant.backend_config.dtype_rules import Place, dtype_config_findings, subsumes

PLACE = Place(2, "torch.add")


def found(*configs: DTypeConfig) -> list[tuple[str, str, str]]:
    findings = dtype_config_findings(configs, PLACE)
    return [(f.severity, f.rule, f.place.split(": ", 1)[1]) for f in findings]


def test_dynamic_with_an_integer_output():
    wrong = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, is_dynamic=True)
    assert found(wrong) == [("error", "dynamic-output", "dtype_configs[0].output_dtype")]
    assert found(DTypeConfig(torch.quint8, torch.float, torch.qint8, is_dynamic=True)) == []
    assert found(DTypeConfig(torch.quint8, torch.quint8, torch.qint8, is_dynamic=False)) == []


def test_bias_scale():
    right = DTypeConfig(
        torch.qint8, torch.qint8, torch.qint8, torch.int32, bias_scale="input_times_weight"
    )
    assert found(right) == []
    float_bias = DTypeConfig(
        torch.qint8, torch.qint8, torch.qint8, torch.float, bias_scale="input_times_weight"
    )
    assert found(float_bias) == [("error", "bias-scale", "dtype_configs[0].bias_scale")]
    weight_only = DTypeConfig(
        torch.float, torch.float, torch.qint8, torch.int32, bias_scale="input_times_weight"
    )
    assert found(weight_only) == [("error", "bias-scale", "dtype_configs[0].bias_scale")]


def test_a_bias_with_the_scale_of_the_output():
    dtypes = (torch.qint8, torch.qint8, torch.qint8, torch.int32)
    assert found(DTypeConfig(*dtypes, bias_scale="output")) == []
    float_output = DTypeConfig(
        torch.qint8, torch.float, torch.qint8, torch.int32, bias_scale="output"
    )
    assert found(float_output) == [("error", "bias-scale", "dtype_configs[0].bias_scale")]


POWER = DTypeWithConstraints(torch.qint8, power_of_two_scale=True)
INT8 = (torch.qint8, torch.qint8, torch.qint8)
WRONG = ("error", "requantization", "dtype_configs[0].requantization")
ROUNDED = ("error", "requantization", "dtype_configs[0].rounding")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DTypeConfig(*INT8, rounding="half_up", requantization="fixed_point"), []),
        (DTypeConfig(torch.qint8, torch.qint8, rounding="half_up"), []),
        (DTypeConfig(torch.qint8, torch.qint8, requantization="fixed_point"), []),
        (DTypeConfig(torch.float, torch.qint8, requantization="fixed_point"), [WRONG]),
        (DTypeConfig(POWER, POWER, requantization="shift"), []),
        (DTypeConfig(torch.qint8, torch.float, torch.qint8, rounding="half_up"), [ROUNDED]),
        (DTypeConfig(*INT8, requantization="fixed_point_twice", rounding="half_even"), [WRONG]),
        (DTypeConfig(*INT8, requantization="shift"), [WRONG]),
        (DTypeConfig(POWER, POWER, POWER, requantization="shift"), []),
    ],
)
def test_requantization(config: DTypeConfig, expected: list[tuple[str, str, str]]):
    assert found(config) == expected


@pytest.mark.parametrize(
    ("config", "right"),
    [
        (DTypeConfig(torch.int16, torch.int16, table_entries=513), True),
        (DTypeConfig(torch.int16, torch.int16, table_entries=65536), True),
        (DTypeConfig(torch.int16, torch.int16, table_entries=512), False),
        (DTypeConfig(torch.qint8, torch.qint8, table_entries=513), False),
        (DTypeConfig(torch.qint8, torch.float, table_entries=257), False),
        (DTypeConfig(*INT8, table_entries=257), False),
    ],
)
def test_tables(config: DTypeConfig, right: bool):
    place = "dtype_configs[0].table_entries"
    assert found(config) == ([] if right else [("error", "table-entries", place)])


@pytest.mark.parametrize(
    ("config", "right"),
    [
        (DTypeConfig(*INT8, requantization_ratio="power_of_two", requantization="shift"), True),
        (DTypeConfig(*INT8, requantization_ratio=(None, 1.0)), True),
        (DTypeConfig(*INT8, requantization_ratio=(1.0, 0.5)), False),
        (DTypeConfig(*INT8, requantization_ratio=(None, None)), False),
        (
            DTypeConfig(torch.qint8, torch.float, torch.qint8, requantization_ratio=(0.1, 1.0)),
            False,
        ),
    ],
)
def test_ratios_of_scales(config: DTypeConfig, right: bool):
    place = "dtype_configs[0].requantization_ratio"
    assert found(config) == ([] if right else [("error", "requantization-ratio", place)])


def test_demands_on_scales_that_are_chosen_at_each_call():
    wrong = DTypeConfig(POWER, torch.float, torch.qint8, is_dynamic=True)
    assert found(wrong) == [("error", "dynamic-scale", "dtype_configs[0].input_dtype")]


def test_each_constraint_is_checked_at_its_place():
    wrong = DTypeWithConstraints(torch.quint8, quant_min_lower_bound=2, quant_max_upper_bound=1)
    places = [place for _, _, place in found(DTypeConfig(), DTypeConfig(wrong, wrong, wrong))]
    assert [place for place in places if "." in place] == [
        "dtype_configs[1].input_dtype",
        "dtype_configs[1].output_dtype",
        "dtype_configs[1].weight_dtype",
    ]


def test_shadowed_configs():
    wide = DTypeConfig(torch.quint8, torch.quint8)
    narrow = DTypeConfig(
        DTypeWithConstraints(torch.quint8, quant_max_upper_bound=127), torch.quint8
    )
    shadowed = ("warning", "dtype-config-shadowed", "dtype_configs[1]")
    half_set = ("note", "bounds-half-set", "dtype_configs[1].input_dtype")
    assert found(wide, wide) == [shadowed]
    assert found(wide, narrow) == [half_set, shadowed]
    assert shadowed not in found(narrow, wide)
    assert found(wide, DTypeConfig(torch.qint8, torch.qint8)) == []


def config(**fields: object) -> DTypeConfig:
    return DTypeConfig(DTypeWithConstraints(torch.quint8, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (config(), config(symmetric=True), True),
        (config(symmetric=True), config(), False),
        (config(symmetric=True), config(symmetric=False), False),
        (config(quant_min_lower_bound=0), config(quant_min_lower_bound=5), True),
        (config(quant_min_lower_bound=5), config(quant_min_lower_bound=0), False),
        (config(quant_max_upper_bound=255), config(quant_max_upper_bound=127), True),
        (config(scale_max_upper_bound=1.0), config(scale_max_upper_bound=2.0), False),
        (config(scale_min_lower_bound=0.1), config(scale_min_lower_bound=0.1), True),
        (DTypeConfig(), config(), True),
        (config(), DTypeConfig(), False),
        (DTypeConfig(), DTypeConfig(is_dynamic=False), True),
        (DTypeConfig(), DTypeConfig(is_dynamic=True), False),
        (DTypeConfig(), DTypeConfig(bias_dtype=torch.float), True),
        (DTypeConfig(bias_dtype=torch.float), DTypeConfig(bias_dtype=torch.int32), False),
        (DTypeConfig(bias_scale="input_times_weight"), DTypeConfig(), False),
    ],
)
def test_subsumes(wide, narrow, expected):
    assert subsumes(wide, narrow) is expected


BOUNDS = st.none() | st.integers(0, 3)
CONFIGS = st.builds(
    lambda low, high, symmetric: config(
        quant_min_lower_bound=low, quant_max_upper_bound=high, symmetric=symmetric
    ),
    BOUNDS,
    BOUNDS,
    st.none() | st.booleans(),
)


def admits(given: DTypeConfig, low: int, high: int, symmetric: bool) -> bool:
    bounds = given.input_dtype_with_constraints
    return (
        (bounds.quant_min_lower_bound is None or low >= bounds.quant_min_lower_bound)
        and (bounds.quant_max_upper_bound is None or high <= bounds.quant_max_upper_bound)
        and bounds.symmetric in (None, symmetric)
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(CONFIGS, CONFIGS)
def test_subsumes_means_admits_at_least_as_much(wide, narrow):
    requests = [(a, b, s) for a in range(5) for b in range(5) for s in (True, False)]
    if subsumes(wide, narrow):
        assert all(admits(wide, *request) for request in requests if admits(narrow, *request))
