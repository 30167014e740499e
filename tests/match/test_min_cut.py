"""Minimum cuts, against trying every cut."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from backquant.match.slower import Network

NODES = 4  # beside source and sink


@st.composite
def edges(draw: st.DrawFn) -> list[tuple[int, int, float]]:
    node = st.integers(0, NODES + 1)
    capacity = st.one_of(st.integers(0, 9).map(float), st.just(math.inf))
    found = draw(st.lists(st.tuples(node, node, capacity), max_size=14))
    return [(a, b, c) for a, b, c in found if a != b and (a, b, c) != (0, 1, math.inf)]


def cost(side: frozenset[int], listed: list[tuple[int, int, float]]) -> float:
    return sum(c for a, b, c in listed if a in side and b not in side)


@given(edges())
def test_no_cut_is_cheaper(listed: list[tuple[int, int, float]]) -> None:
    others = range(2, NODES + 2)
    sides = [
        frozenset({0, *inside})
        for count in range(NODES + 1)
        for inside in itertools.combinations(others, count)
    ]
    cheapest = min(cost(side, listed) for side in sides)
    if math.isinf(cheapest):
        return  # source and sink are not to be parted
    network = Network()
    for _ in others:
        network.add_node()
    for edge in listed:
        network.add_edge(*edge)
    found = network.source_side()
    assert 0 in found and 1 not in found
    assert cost(found, listed) == cheapest
    smallest = min(len(side) for side in sides if cost(side, listed) == cheapest)
    assert len(found) == smallest


def test_a_long_chain_takes_no_recursion() -> None:
    network, before = Network(), 0
    for _ in range(5000):
        node = network.add_node()
        network.add_edge(before, node, 2.0)
        before = node
    network.add_edge(before, 1, 1.0)
    assert len(network.source_side()) == 5001
