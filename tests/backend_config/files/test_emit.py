from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backquant.backend_config.files.located import read_json, read_yaml
from backquant.backend_config.files.store import emit_json, emit_yaml

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TRICKY = st.sampled_from(
    [
        "yes",
        "on",
        "1e5",
        "1.5",
        "null",
        "~",
        "",
        "2**-12",
        "- a",
        "a: b",
        "#",
        "*x",
        "&x",
        "!!int 1",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
    | TRICKY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS | TRICKY, inner, max_size=4),
    max_leaves=15,
)
DATA = st.dictionaries(TEXTS | TRICKY, VALUES, min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(DATA)
def test_yaml_comes_back(data):
    assert read_yaml(emit_yaml(data), "x.yaml").data == data


@settings(max_examples=60, deadline=None, derandomize=True)
@given(DATA)
def test_json_comes_back(data):
    assert read_json(emit_json(data), "x.json").data == data


@pytest.mark.parametrize("emit", [emit_yaml, emit_json])
def test_layout(emit):
    text = emit({"entries": [{"patterns": [["a.b", "c.d"], "e.f"], "long": ["x" * 40] * 3}]})
    assert any("[" in line and "a.b" in line and "c.d" in line for line in text.splitlines())
    assert sum("xxx" in line for line in text.splitlines()) == 3


def test_integer_keys_are_plain():
    assert "{0: a, 1: b}" in emit_yaml({"entries": [{"counts": {0: "a", 1: "b"}}]})
