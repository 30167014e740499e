"""The values that migration gives."""

from __future__ import annotations

import json

from backquant.migrate import FileResult, Finding

FINDING = Finding("a.py", 3, 4, "engine", "x", "because", "do this")


def test_a_finding_without_a_line_names_the_file() -> None:
    assert str(FINDING).splitlines()[0] == "a.py:3: x (engine)"
    whole = Finding("a.py", 0, 0, "file", "x", "because", "do this")
    assert str(whole).splitlines()[0] == "a.py: x (file)"


def test_findings_sort_by_place() -> None:
    later = Finding("a.py", 12, 0, "engine", "x", "because", "do this")
    assert sorted([later, FINDING]) == [FINDING, later]


def test_results_are_data() -> None:
    result = FileResult("a.py", "x", "y", (FINDING,))
    assert json.loads(json.dumps(result.to_dict()))["changed"] is True
    assert json.loads(json.dumps(vars(FINDING)))["kind"] == "engine"
    assert not result.held
