"""The report that a person reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backquant.migrate import FileResult, Finding, Migration, migrate_source, report_text


def test_nothing_to_do() -> None:
    assert report_text(Migration((FileResult("a.py", "x", "x"),))) == "1 file, nothing to do"
    assert report_text(Migration(())) == "0 files, nothing to do"


def test_places_are_grouped_by_reason() -> None:
    one, two = (Finding("a.py", n, 0, "engine", f"x{n}", "because", "do this") for n in (1, 2))
    other = Finding("b.py", 0, 0, "file", "unreadable", "a reason", "that")
    files = (FileResult("a.py", "x", "y", (one, two)), FileResult("b.py", "", "", (other,)))
    assert report_text(Migration(files)).splitlines() == [
        "would change   a.py",
        "",
        "engine: because",
        "  how  do this",
        "  a.py:1  x1",
        "  a.py:2  x2",
        "",
        "file: a reason",
        "  how  that",
        "  b.py  unreadable",
        "",
        "2 files, 1 would change, 3 places for a person",
    ]


def test_the_report_of_the_corpus(corpus: Path, snapshot: Any) -> None:
    results = [
        migrate_source(path.read_text(encoding="utf-8"), path.name)
        for path in sorted((corpus / "before").glob("*.py"))
    ]
    snapshot("report_of_the_corpus", report_text(Migration(tuple(results))))
