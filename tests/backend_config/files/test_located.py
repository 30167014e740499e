from __future__ import annotations

from backquant.backend_config.files.located import Listing, Located, fail, field_name, read_yaml

TREE = read_yaml("a:\n  - b: 1\n    c: 2\n", "x.yaml")


def test_parts_that_lead_nowhere_are_skipped():
    assert TREE.at(("a", "list", 0, "mapping", "c")) == 2


def test_known_path_keeps_a_missing_last_key():
    assert TREE.known_path(("a", "list", 0, "missing")) == ("a", 0, "missing")
    assert TREE.known_path(("a", "list", 0, "c", "text")) == ("a", 0, "c")


def test_line_of_a_missing_key_is_that_of_its_mapping():
    assert TREE.line_of(("a", 0, "missing")) == 2


def test_a_place_of_a_missing_key_is_that_of_the_key_of_its_mapping():
    tree = read_yaml("a:\n  b: 1\n", "x.yaml")
    assert (tree.place(("a", "c")), tree.line_of(("a", "c"))) == ("x.yaml:1: a.c", 2)


def test_out_of_range_positions():
    assert TREE.line_of(("a", 7)) == 2
    assert Located("x.yaml", Listing(4)).line_of((0, "x")) == 4


def test_field_name():
    assert field_name(()) == ""
    assert field_name(("a", 0, "b")) == "a[0].b"


def test_fail_names_file_line_and_field():
    assert str(fail("x.yaml", 3, "is wrong", "mend it", "a[0]")) == (
        "is wrong\n  where  x.yaml:3: a[0]\n  fix    mend it"
    )
