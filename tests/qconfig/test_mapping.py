from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from torch import nn

from backquant.errors import ConfigError
from backquant.observe import MinMaxObserver
from backquant.qconfig import (
    RULE_KINDS,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_qconfig,
    float16_static_qconfig,
)


def filled(cls: Any = QConfigMapping) -> Any:
    return (
        cls()
        .set_global(default_qconfig)
        .set_object_type(nn.Linear, default_dynamic_qconfig)
        .set_object_type(torch.add, None)
        .set_object_type("reshape", float16_static_qconfig)
        .set_module_name_regex(r"a.*b\d", default_qconfig)
        .set_module_name_regex("a.*", None)
        .set_module_name("a.b", default_qconfig)
        .set_module_name_object_type_order("a", nn.functional.linear, 1, None)
    )


def test_setters_and_dicts_equal_the_oracles(
    assert_same_mapping: Callable[[Any, Any], None],
) -> None:
    ours, theirs = filled(), filled(ao.QConfigMapping)
    assert_same_mapping(ours, theirs)
    assert ours.to_dict() == theirs.to_dict()
    assert_same_mapping(
        QConfigMapping.from_dict(theirs.to_dict()), ao.QConfigMapping.from_dict(ours.to_dict())
    )


def test_round_trips() -> None:
    mapping = filled()
    for other in (
        QConfigMapping.from_dict(mapping.to_dict()),
        copy.deepcopy(mapping),
        pickle.loads(pickle.dumps(mapping)),
    ):
        assert other == mapping
        assert list(map(repr, other.rules())) == list(map(repr, mapping.rules()))


def test_older_dicts_may_give_a_kind_as_a_dict() -> None:
    mapping = QConfigMapping.from_dict(
        {
            "": default_qconfig,
            "object_type": {nn.Linear: default_dynamic_qconfig, torch.add: None},
            "module_name_object_type_order": {("a", nn.Linear, 0): None},
        }
    )
    assert list(mapping.object_type_qconfigs) == [nn.Linear, torch.add]
    assert list(mapping.module_name_object_type_order_qconfigs) == [("a", nn.Linear, 0)]


def test_setting_again_replaces_in_place() -> None:
    mapping = filled().set_module_name_regex(r"a.*b\d", None)
    assert list(mapping.module_name_regex_qconfigs.items()) == [(r"a.*b\d", None), ("a.*", None)]


def test_rules_and_lookup_agree() -> None:
    mapping = filled()
    rules = mapping.rules()
    assert [r.kind for r in rules] == sorted((r.kind for r in rules), key=RULE_KINDS.index)
    for rule in rules:
        assert mapping.lookup(rule.kind, rule.index) is rule.qconfig
    assert [r.key for r in rules] == [
        "",
        "torch.nn.Linear",
        "torch.add",
        ".reshape()",
        r"a.*b\d",
        "a.*",
        "a.b",
        "a torch.nn.functional.linear [1]",
    ]
    assert rules[1].target is nn.Linear


def test_lookup_takes_the_kinds_of_the_plan() -> None:
    from backquant.match.plan import RuleKind

    assert {kind.value for kind in RuleKind} == set(RULE_KINDS)
    assert filled().lookup(RuleKind.MODULE_NAME, 0) == default_qconfig


@pytest.mark.parametrize(("kind", "index"), [("module_name", 1), ("module_name", -1), ("type", 0)])
def test_missing_rules_are_refused(kind: str, index: int) -> None:
    with pytest.raises(ConfigError, match=f"no rule {index} of kind '{kind}'"):
        filled().lookup(kind, index)


def test_equality_heeds_order_for_regexes_only() -> None:
    one = QConfigMapping().set_module_name("a", None).set_module_name("b", default_qconfig)
    two = QConfigMapping().set_module_name("b", default_qconfig).set_module_name("a", None)
    assert one == two
    regexes = [
        QConfigMapping().set_module_name_regex(a, None).set_module_name_regex(b, None)
        for a, b in (("x", "y"), ("y", "x"))
    ]
    assert regexes[0] != regexes[1]
    assert one != QConfigMapping().set_module_name("a", None)
    assert one != two.set_module_name("a", default_qconfig)
    assert QConfigMapping().set_global(None) == QConfigMapping()
    same = QConfig(MinMaxObserver.with_args(eps=0.5), MinMaxObserver)
    assert QConfigMapping().set_global(same) == QConfigMapping().set_global(
        QConfig(MinMaxObserver.with_args(eps=0.5), MinMaxObserver)
    )
    assert one != "something"


def test_repr_lists_the_rules_and_joins_equal_neighbours() -> None:
    mapping = QConfigMapping().set_module_name("a", None).set_module_name("b", None)
    assert repr(mapping) == "QConfigMapping(\n  global: None\n  module_name a, b: None\n)"


def test_pytorchs_qconfigs_are_taken() -> None:
    theirs = ao.get_default_qconfig("fbgemm")
    assert QConfigMapping().set_global(theirs).global_qconfig is theirs


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda m: m.set_global(MinMaxObserver), "takes a QConfig or None"),
        (lambda m: m.set_global("x86"), "takes a QConfig or None"),
        (lambda m: m.set_object_type(3, None), "a module class, a function or a method name"),
        (lambda m: m.set_module_name(nn.Linear, None), "named by its path"),
        (lambda m: m.set_module_name_regex("a[", None), "not a regular expression"),
        (lambda m: m.set_module_name_regex(3, None), "not a regular expression"),
        (lambda m: m.set_module_name_object_type_order("a", nn.Linear, -1, None), "from 0"),
        (lambda m: m.set_module_name_object_type_order("a", nn.Linear, True, None), "from 0"),
        (lambda m: m.set_module_name_object_type_order("a", 3, 0, None), "a module class"),
    ],
)
def test_malformed_rules_are_refused(rule: Callable[[Any], Any], message: str) -> None:
    mapping = filled()
    with pytest.raises(ConfigError, match=message) as caught:
        rule(mapping)
    assert caught.value.fix
    assert mapping == filled()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objecttype": []}, "did you mean 'object_type'"),
        ({"module_name": [("a",)]}, "tuple of 2"),
        ({"module_name_object_type_order": [("a", nn.Linear, None)]}, "tuple of 4"),
        ({"module_name": [("fc", None), ("fc", default_qconfig)]}, "name fc with different"),
        (
            {"object_type": [(nn.Linear, None), (nn.Linear, default_qconfig)]},
            "name torch.nn.Linear with different",
        ),
    ],
)
def test_malformed_dicts_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        QConfigMapping.from_dict(given)
    assert message in str(caught.value)


def test_the_same_rule_twice_is_one_rule() -> None:
    twice = [("fc", default_qconfig), ("fc", default_qconfig)]
    assert len(QConfigMapping.from_dict({"module_name": twice}).module_name_qconfigs) == 1


def test_an_unknown_key_of_a_dict_has_no_effect_and_warns() -> None:
    with pytest.warns(UserWarning, match="'version' has no effect"):
        assert QConfigMapping.from_dict({"": None, "version": 3}) == QConfigMapping()
