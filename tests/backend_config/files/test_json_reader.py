from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backquant.backend_config.files.located import read_json
from backquant.errors import SpecError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # lone surrogates aside, any text
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_agrees_with_the_standard_library(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read_json(text, "x.json").data == json.loads(text)


def test_lines():
    tree = read_json('{\n "a": [\n  1,\n  {"b": 2}\n ]\n}', "x.json")
    assert tree.line_of(("a",)) == 2
    assert tree.line_of(("a", 0)) == 3
    assert tree.line_of(("a", 1, "b")) == 4


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ('{"a": 1,\n"a": 2}', 'the key "a" appears twice (first on line 1)', 2),
        ("{\n'a': 1}", "not valid JSON: Expecting property name", 2),
        ('{"a":\nNaN}', "NaN is no number", 2),
        ('{"a": 01}', "not valid JSON: Expecting ',' delimiter", 1),
        ('{"a": 1,}', "not valid JSON", 1),
        ("[1,\n]", "not valid JSON", 2),
        ("", "not valid JSON: Expecting value", 1),
        ('{"a": "x\ny"}', "Invalid control character", 1),
        ('"\\x"', "not valid JSON", 1),
        ("{} {}", "Extra data", 1),
        ("[" * 100 + "]" * 100, "nested deeper than", 1),
        ("1" * 401, "more than 400 digits", 1),
    ],
)
def test_malformed(text, message, line):
    with pytest.raises(SpecError) as caught:
        read_json(text, "x.json")
    assert message in caught.value.what
    assert caught.value.where.startswith(f"x.json:{line}")


def test_byte_order_mark_is_skipped():
    assert read_json("\ufeff{}", "x.json").data == {}


def test_what_no_parser_takes_is_an_error():
    with pytest.raises(SpecError, match="nested deeper than"):
        read_json("[" * 100_000, "x.json")
