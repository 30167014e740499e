from __future__ import annotations

from backquant.backend_config.files.located import Located, fail, field_name, read_yaml

TREE = read_yaml("a:\n  - b: 1\n    c: 2\n", "x.yaml")


def test_parts_that_lead_nowhere_are_skipped():
    assert TREE.at(("a", "list", 0, "mapping", "c")).value == 2


def test_known_path_keeps_a_missing_last_key():
    assert TREE.known_path(("a", "list", 0, "missing")) == ("a", 0, "missing")
    assert TREE.known_path(("a", "list", 0, "c", "text")) == ("a", 0, "c")


def test_line_of_a_missing_key_is_that_of_its_mapping():
    assert TREE.line_of(("a", 0, "missing")) == 2


def test_out_of_range_positions():
    assert TREE.at(("a", 7)).line == 2
    assert Located([], 4).at((0, "x")).line == 4


def test_field_name():
    assert field_name(()) == ""
    assert field_name(("a", 0, "b")) == "a[0].b"


def test_fail_names_file_line_and_field():
    assert str(fail("x.yaml", 3, ("a", 0), "is wrong", "mend it")) == (
        "is wrong\n  where  x.yaml:3: a[0]\n  fix    mend it"
    )
