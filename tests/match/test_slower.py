"""What is left in float for its speed, from tables of costs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backquant.match.plan import Match, Plan
from backquant.match.slower import (
    MARGIN,
    QUIET,
    Costs,
    Unit,
    Value,
    in_float,
    slower_than_float,
    total,
)


def chain(*times: tuple[float, float], border: float = 2.0) -> Costs:
    """Operators one after the other, between floats."""
    units = tuple(Unit((i,), a, b, multiply_adds=1) for i, (a, b) in enumerate(times))
    ends: list[int | None] = [None, *range(len(units)), None]
    pairs = itertools.pairwise(ends)
    return Costs(units, tuple(Value(a, (b,), border, border) for a, b in pairs))


def plan_of(costs: Costs) -> Plan:
    return Plan(
        "x86",
        matches=tuple(Match(0, "Linear", (f"n{i}",), f"n{i}") for i in range(len(costs.units))),
    )


def test_a_chain_of_slow_operators_goes_to_float_but_one() -> None:
    """Whoever asks for a quantized model gets one: the least slow stays."""
    costs = chain((20, 5), (9, 5), (20, 5))
    assert in_float(costs) == {0, 2}


def test_operators_without_work_may_all_go() -> None:
    costs = chain((20, 5), (9, 5))
    idle = replace(costs, units=tuple(replace(u, multiply_adds=0) for u in costs.units))
    assert in_float(idle) == {0, 1}


def test_a_slow_operator_between_fast_ones_stays_where_leaving_costs_more() -> None:
    assert in_float(chain((5, 50), (8, 6), (5, 50))) == frozenset()
    assert in_float(chain((5, 50), (30, 6), (5, 50))) == {1}


def test_what_is_kept_stays() -> None:
    costs = chain((5, 50), (30, 6))
    assert in_float(costs) == {1}
    kept = replace(costs.units[1], kept=True)
    assert in_float(replace(costs, units=(costs.units[0], kept))) == frozenset()


def test_a_small_gain_decides_nothing() -> None:
    """Two measurements decide the same."""
    for gain in (0.0, 0.01, 0.02, 0.04):
        units = (Unit((0,), 100.0, 100.0 * (1 - gain)), Unit((1,), 1.0, 50.0, multiply_adds=1))
        assert in_float(Costs(units)) == frozenset()


def test_a_value_is_quantized_once_for_all_its_readers() -> None:
    units = tuple(Unit((i,), 5.0, 6.0, multiply_adds=1) for i in range(4))
    shared = Costs(units, (Value(None, (0, 1, 2, 3), 3.0, 3.0),))
    each = Costs(units, tuple(Value(None, (i,), 3.0, 3.0) for i in range(4)))
    assert in_float(shared) == frozenset()
    assert len(in_float(each)) == 3


def test_dynamic_kernels_convert_nothing() -> None:
    dynamic = Unit((0,), 5.0, 6.0, takes_float=True, gives_float=True, multiply_adds=1)
    costs = Costs((dynamic,), (Value(None, (0,), 50.0, 50.0), Value(0, (None,), 50.0, 50.0)))
    assert total(costs, frozenset()) == 5.0
    assert in_float(costs) == frozenset()


def test_a_kernel_that_gives_floats_needs_no_dequantize() -> None:
    linear = Unit((0,), 5.0, 9.0, gives_float=True, multiply_adds=1)
    other = Unit((1,), 30.0, 6.0, multiply_adds=1)
    costs = Costs((linear, other), (Value(0, (1,), 3.0, 40.0),))
    assert in_float(costs) == {1}
    assert total(costs, frozenset({1})) == 11.0


def test_the_reason_has_both_figures_with_the_conversions() -> None:
    costs = chain((5, 50), (30, 6), (5, 50))
    ((match, reason),) = slower_than_float(plan_of(costs), costs).items()
    assert (match, reason.node, reason.rule) == (1, "n1", "slower-than-float")
    assert reason.asked.startswith("integers: 30.0 µs")
    assert reason.admitted == "float: 10.0 µs"  # 6, and 2 for each conversion that comes with it
    assert 'slower="keep"' in reason.fix


def test_operators_that_go_together_share_their_figures() -> None:
    costs = chain((5, 50), (30, 6), (20, 4))
    reasons = slower_than_float(plan_of(costs), costs)
    assert set(reasons) == {1, 2}
    assert {r.asked for r in reasons.values()} == {
        "integers: 52.0 µs with what it takes to quantize and dequantize, "
        "with one operator beside it"
    }
    assert {r.admitted for r in reasons.values()} == {"float: 12.0 µs"}


@st.composite
def tables(draw: st.DrawFn) -> Costs:
    count = draw(st.integers(1, 5))
    times = st.integers(0, 40).map(float)
    units = tuple(Unit((i,), draw(times), draw(times)) for i in range(count))
    end = st.one_of(st.none(), st.integers(0, count - 1))
    values = []
    for _ in range(draw(st.integers(0, 6))):
        producer = draw(end)
        readers = draw(st.sets(end, min_size=1, max_size=3)) - {producer}
        if readers:
            ordered = tuple(sorted(readers, key=lambda r: -1 if r is None else r))
            values.append(Value(producer, ordered, draw(times), draw(times)))
    return Costs(units, tuple(values))


@given(tables())
def test_no_other_choice_is_cheaper(costs: Costs) -> None:
    """Under the margin that float has to overcome."""
    against = replace(
        costs,
        units=tuple(replace(u, floating=MARGIN * u.floating + QUIET) for u in costs.units),
    )
    places = range(len(costs.units))
    choices = [
        frozenset(chosen)
        for count in range(len(costs.units) + 1)
        for chosen in itertools.combinations(places, count)
    ]
    best = min(total(against, chosen) for chosen in choices)
    assert total(against, in_float(costs)) == pytest.approx(best)
