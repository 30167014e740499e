from __future__ import annotations

import pytest

from backquant.backend_config.files.located import plain_scalar, read_yaml
from backquant.errors import SpecError


def read(text: str) -> object:
    return read_yaml(text, "x.yaml").data


def test_values_and_lines():
    tree = read_yaml("a: 1\nb:\n  - c: {d: 2}\n  - x\n", "x.yaml")
    assert tree.data == {"a": 1, "b": [{"c": {"d": 2}}, "x"]}
    assert tree.line_of(("b", 0, "c", "d")) == 3
    assert tree.line_of(("b", 1)) == 4
    assert tree.line_of(("b",)) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("off", "off"),
        ("2020-01-01", "2020-01-01"),
        ("1:30", "1:30"),
        ("1e-5", 1e-5),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-7", -7),
        ("0x10", "0x10"),
        ("~", None),
        ("", None),
        ("True", True),
        ("2**-12", "2**-12"),
        ("9" * 41, "9" * 41),
    ],
)
def test_core_schema(text, value):
    assert plain_scalar(text) == value
    assert type(plain_scalar(text)) is type(value)


def test_quoted_is_text():
    assert read("a: '1'\nb: \"true\"\n") == {"a": "1", "b": "true"}


def test_aliases_are_expanded():
    assert read("a: &x [1]\nb: *x\n") == {"a": [1], "b": [1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", 'the key "a" appears twice (first on line 1)'),
        ("a: [1\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system [x]\n", "is not supported"),
        ("a: !mine 1\n", "is not supported"),
        ("[a]: 1\n", "a key must be a plain word"),
        ("", "the file is empty"),
        ("a: *nothing\n", "not valid YAML"),
        ("&a [*a]", "nested deeper than"),
        ("---\na: 1\n---\nb: 2\n", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_malformed(text, message):
    with pytest.raises(SpecError, match=r"x\.yaml") as caught:
        read(text)
    assert message in caught.value.what


def test_second_key_is_placed_on_its_own_line():
    with pytest.raises(SpecError) as caught:
        read("a: 1\nb: 2\na: 3\n")
    assert caught.value.where == "x.yaml:3: a"


def test_expansion_is_bounded():
    levels = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
    )
    with pytest.raises(SpecError, match="more than"):
        read(levels)
