"""Conditions that nothing satisfies."""

from __future__ import annotations

import pytest

from backquant.backend_config.conditions import condition_from, contradictions

NEVER = [
    {"stride": {"min": 4, "max": 3}},
    {"kernel_size": {"max": 0}},
    {"stride": [1, 2], "any": [{"batch": 1}], "all": [{"stride": {"min": 3}}]},
    {"in_channels": {"multiple_of": 16, "max": 15}},
    {"in_channels": {"multiple_of": 16, "equals": 8}},
    {"groups": {"multiple_of": 0}},
    {"mode": "nearest", "all": [{"mode": "bilinear"}]},
    {"any": [{"batch": {"min": 2, "max": 1}}, {"rank": {"max": -1}}]},
    {"padding": 0, "not": {"padding": 0}},
]
SOMETIMES = [
    {"stride": {"min": 1, "max": 3}},
    {"in_channels": {"multiple_of": 16, "max": 16}},
    {"stride": [1, 2, 4], "all": [{"stride": {"min": 3}}]},
    {"groups": {"equals": "in_channels"}, "in_channels": {"max": 4}},
    {"any": [{"batch": {"min": 2, "max": 1}}, {"rank": 4}]},
    {"dim": [[-2, -1], -1]},
    {"padding": 0, "not": {"stride": 1}},
]


@pytest.mark.parametrize("data", NEVER, ids=str)
def test_contradictions_are_found(data) -> None:
    assert list(contradictions(condition_from(data)))


@pytest.mark.parametrize("data", SOMETIMES, ids=str)
def test_what_can_hold_is_left_alone(data) -> None:
    assert not list(contradictions(condition_from(data)))
