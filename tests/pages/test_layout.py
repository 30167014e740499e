from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backquant.pages.layout import BOX_WIDTH, MAX_BENDS, lay_out


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], dict[str, list[str]]]:
    count = draw(st.integers(0, 25))
    names = [f"n{i}" for i in range(count)]
    inputs = {
        name: [names[j] for j in draw(st.lists(st.integers(0, i - 1), max_size=3))] if i else []
        for i, name in enumerate(names)
    }
    return names, inputs


@given(graphs())
def test_boxes_never_overlap_and_inputs_stand_above(
    graph: tuple[list[str], dict[str, list[str]]],
) -> None:
    names, inputs = graph
    drawing = lay_out(names, inputs)
    assert set(drawing.centres) == set(names)
    rows: dict[float, list[float]] = {}
    for x, y in drawing.centres.values():
        assert x + 0.1 >= BOX_WIDTH / 2 and x - 0.1 <= drawing.width - BOX_WIDTH / 2
        rows.setdefault(y, []).append(x)
    for row in rows.values():
        assert all(b - a >= BOX_WIDTH for a, b in pairwise(sorted(row)))
    for name in names:
        for source in inputs[name]:
            assert drawing.centres[source][1] < drawing.centres[name][1]
    assert {(e.source, e.target) for e in drawing.edges} == {
        (s, n) for n in names for s in inputs[n]
    }


def test_a_long_skip_has_few_bends() -> None:
    names = [f"n{i}" for i in range(200)]
    inputs = {b: [a] for a, b in pairwise(names)}
    inputs["n199"] = ["n198", "n0"]
    longest = max(len(edge.points) for edge in lay_out(names, inputs).edges)
    assert longest <= MAX_BENDS + 2


def test_a_name_that_is_not_drawn_is_no_edge() -> None:
    assert lay_out(["a"], {"a": ["x"]}).edges == ()
