"""The table of sites as data."""

from __future__ import annotations

import copy
import pickle

from backquant.match.plan import RuleKind, RuleRef
from backquant.prepare import ObserverSpec, Role, Site, SiteTable

SPEC = ObserverSpec(RuleRef(RuleKind.GLOBAL, 0, ""), "activation")
TABLE = SiteTable(
    (
        Site("a", "x", Role.INPUT, SPEC, ("conv", "pool"), group="a"),
        Site("b", "conv", Role.OUTPUT, SPEC, (), "conv", "b"),
        Site("c", "pool", Role.OUTPUT, SPEC, (), "pool", "a"),
    )
)


def test_lookup():
    assert TABLE["b"].producer == "conv"
    assert "c" in TABLE
    assert "d" not in TABLE


def test_groups_are_in_order():
    assert TABLE.groups() == {"a": ("a", "c"), "b": ("b",)}
    assert [site.shared for site in TABLE.sites] == [False, False, True]


def test_copies_are_equal_and_can_be_asked():
    for again in (copy.deepcopy(TABLE), pickle.loads(pickle.dumps(TABLE))):
        assert again == TABLE
        assert again["a"].readers == ("conv", "pool")
