"""Any text has a plain name of its own, and is read from it again."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backquant.identifiers import identifier, identifiers, is_identifier, label

NAMES = st.text(min_size=0).filter(lambda name: "." not in name)


@given(NAMES)
def test_a_name_stands_in_source_as_itself(name: str) -> None:
    plain = identifier(name)
    if plain.isdecimal():
        assert plain == name
        return
    assert is_identifier(plain)
    tree = ast.parse(f"self.{plain}", mode="eval")
    assert isinstance(tree.body, ast.Attribute)
    assert tree.body.attr == plain


@given(st.lists(NAMES, min_size=1))
def test_labels_are_the_users_names(names: list[str]) -> None:
    assert label(identifiers(names)) == ".".join(names)


@given(NAMES, NAMES)
def test_no_two_names_become_one(one: str, other: str) -> None:
    assert (identifier(one) == identifier(other)) == (one == other)


@pytest.mark.parametrize("name", ["conv1", "0", "12", "_hidden", "in_proj_weight"])
def test_plain_names_stay(name: str) -> None:
    assert identifier(name) == name == label(name)


@pytest.mark.parametrize(
    "name", ["bqname_x", "bqname_", "bqname__zz", "__class__", "٣", "²", "\ud800"]
)
def test_names_of_ours_and_look_alikes_are_written_out(name: str) -> None:
    assert identifier(name) != name
    assert label(identifier(name)) == name


@pytest.mark.parametrize(
    "name", ["bqname__zz", "bqname__110000_", "bqname_conv1", "bqname__0b5_", "bqname_%"]
)
def test_what_was_never_written_is_no_label(name: str) -> None:
    assert label(name) == name
