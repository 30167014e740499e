from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from backquant.backend_config import checks
from backquant.backend_config.kinds import Flag
from backquant.errors import SpecError


def test_unknown_key_without_a_near_one_lists_the_fields() -> None:
    with pytest.raises(SpecError) as caught:
        checks.check_keys({"zzz": 1}, ["name", "configs"], "BackendConfig")
    assert str(caught.value) == (
        "BackendConfig has no field 'zzz'\n  where  zzz\n  fix    fields: name, configs"
    )


def test_check_keys_wants_a_dict() -> None:
    with pytest.raises(SpecError, match="BackendConfig is built from a dict, got list"):
        checks.check_keys([], ["name"], "BackendConfig")  # type: ignore[arg-type]


def test_renamed_keeps_the_order_and_the_original() -> None:
    given = {"a": 1, "old": 2, "z": 3}
    assert list(checks.renamed(given, "old", "new").items()) == [("a", 1), ("new", 2), ("z", 3)]
    assert "old" in given


def test_renamed_accepts_both_names_when_they_agree_and_refuses_when_not() -> None:
    assert checks.renamed({"old": 1, "new": 1}, "old", "new") == {"new": 1}
    with pytest.raises(SpecError, match="two names of one field and differ: 1, 2"):
        checks.renamed({"old": 1, "new": 2}, "old", "new")


@pytest.mark.parametrize("value", [nn.Linear(1, 1), int, "torch.nn.Linear", 3])
def test_module_class_refuses_what_is_no_module_class(value: Any) -> None:
    with pytest.raises(SpecError, match=r"root_module must be a subclass of torch\.nn\.Module"):
        checks.check_module_class(value, "root_module")


def test_module_instance_gets_its_class_as_fix() -> None:
    with pytest.raises(SpecError) as caught:
        checks.check_module_class(nn.ReLU(), "fused_module")
    assert caught.value.fix == "pass the class: ReLU"


@pytest.mark.parametrize("value", [True, "1", 1j])
def test_number_refuses(value: Any) -> None:
    with pytest.raises(SpecError, match="eps must be int or float"):
        checks.check_number(value, "eps")


@pytest.mark.parametrize("value", [-1, True, 1.0, "0"])
def test_count_refuses(value: Any) -> None:
    with pytest.raises(SpecError, match="expected a count or a position"):
        checks.check_count(value, "index")


def test_bool_refuses_numbers_that_equal_one() -> None:
    with pytest.raises(SpecError, match="is_dynamic must be a bool, got 1"):
        Flag().check(1, "is_dynamic")


def test_choice_names_the_near_one_or_all() -> None:
    with pytest.raises(SpecError) as near:
        checks.check_choice("per_chanel", "granularity", ("per_tensor", "per_channel"))
    assert near.value.fix == "did you mean 'per_channel'?"
    with pytest.raises(SpecError) as far:
        checks.check_choice("x", "granularity", ("per_tensor", "per_channel"))
    assert far.value.fix == "one of 'per_tensor', 'per_channel'"


def test_within_nests_places() -> None:
    with pytest.raises(SpecError) as caught, checks.within("configs[3]"), checks.within("a"):
        raise SpecError("wrong", where="[0]")
    assert caught.value.where == "configs[3].a[0]"
    assert caught.value.args == ("wrong", "configs[3].a[0]", "")


def test_within_without_an_inner_place() -> None:
    with pytest.raises(SpecError) as caught, checks.within("defaults"):
        raise SpecError("wrong")
    assert caught.value.where == "defaults"
