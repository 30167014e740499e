"""Conditions as data: read, written, shown, and refused."""

from __future__ import annotations

import pytest

from backquant.backend_config.conditions import condition_data, condition_from
from backquant.errors import SpecError

WRITTEN = [
    {"batch": 1},
    {"kernel_size": {"max": 7}, "stride": [1, 2], "groups": {"equals": "in_channels"}},
    {"rank": {"min": 2, "max": 4}, "in_channels": {"multiple_of": 16}, "shape": "static"},
    {"kernel_height * kernel_width": {"max": 4096}, "weight_sums": {"max": 8323072}},
    {"any": [{"rank": {"max": 3}}, {"batch": 1, "rank": 4}], "not": {"padding": 0}},
    {"all": [{"not": {"padding": 0}}, {"not": {"stride": 1}}]},
    {"mode": "bilinear", "align_corners": False, "other.constant": True, "approximate": "none"},
    {"dim": [[-2, -1], [2, 3]], "output.dims": {"equals": "input.dims"}},
    {"dim": {"equals": [1, 2]}, "input.dims[1:]": {"max": 65536}},
    {"output.height / input.height": [2, 4, 8], "ceil(in_channels / 16)": {"max": 4}},
    {"size": None},
]


@pytest.mark.parametrize("data", WRITTEN, ids=str)
def test_what_is_written_comes_back(data) -> None:
    condition = condition_from(data)
    assert condition_from(condition_data(condition)) == condition
    assert condition_data(condition) == data


def test_nothing_is_no_condition() -> None:
    assert condition_from(None) is None
    assert condition_from({}) is None


def test_a_condition_is_taken_as_it_is() -> None:
    condition = condition_from({"batch": 1})
    assert condition_from(condition) is condition
    assert hash(condition) == hash(condition_from({"batch": {"equals": 1}}))


def test_not_inside_of_a_comparison_is_of_each_value() -> None:
    each, whole = {"padding": {"not": 0}}, {"not": {"padding": 0}}
    assert condition_from(each) != condition_from(whole)
    assert condition_data(condition_from(each)) == each
    assert condition_data(condition_from(whole)) == whole


def test_powers_of_two_are_numbers() -> None:
    assert condition_from({"elements": {"max": "2**16"}}) == condition_from(
        {"elements": {"max": 65536}}
    )


WRONG = {
    "no mapping": [1],
    "unknown comparison": {"stride": {"maximum": 3}},
    "no list": {"any": {"stride": 1}},
    "empty": {"not": {}},
    "empty comparison": {"stride": {}},
    "one of no list": {"stride": {"one_of": 3}},
    "a word": {"stride": {"max": "three four"}},
    "a flag as a bound": {"stride": {"max": True}},
    "a mapping in a list": {"stride": [{"max": 1}]},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_condition(name: str, snapshot) -> None:
    with pytest.raises(SpecError) as error:
        condition_from(WRONG[name])
    snapshot(name.replace(" ", "_"), str(error.value))


BY_HAND = {
    "kernel_height": lambda fix, _: [condition_from({one: {"max": 4}}) for one in fix.split(", ")],
}
