"""Union-find over sites."""

from __future__ import annotations

import random

from backquant.prepare.placement import Groups


def test_the_head_is_that_of_the_first_group():
    groups = Groups()
    groups.unite("a", "b")
    groups.unite("c", "d")
    groups.unite("d", "a")  # the group of d, whose head is c, takes over a and b
    assert {groups.find(name) for name in "abcd"} == {"c"}


def test_equal_to_a_naive_partition():
    chooser = random.Random(1)
    names = [str(i) for i in range(60)]
    groups, naive = Groups(), {name: (name, {name}) for name in names}
    for _ in range(80):
        one, two = chooser.choice(names), chooser.choice(names)
        groups.unite(one, two)
        head, members = naive[one]
        merged = (head, members | naive[two][1])
        for member in merged[1]:
            naive[member] = merged
        assert all(groups.find(name) == naive[name][0] for name in names)


def test_long_chains_do_not_recurse():
    groups = Groups()
    for i in range(20_000):
        groups.unite(str(i), str(i + 1))
    assert groups.find("20000") == "0"
