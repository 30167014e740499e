"""A run's page, divided into a section and a CSV, and the sections and CSVs that are committed."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

from backquant.conformance import Conformance
from backquant.conformance.results import Tally, Verdict
from tools import conformance_split

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/conformance/engines.md").read_text(encoding="utf-8")


def run() -> Conformance:
    wrong = {
        "verdicts": Counter([Verdict.WRONG]),
        "reasons": {Verdict.WRONG: "off by 2 steps; twice"},
    }
    names = ("add", "mul", "sub", "neg")
    tallies = {(name, "int8"): Tally(name, "int8", **wrong) for name in names}
    tallies["relu", "int8 (relu)"] = Tally(
        "relu", "int8 (relu)", verdicts=Counter([Verdict.CONFORMS])
    )
    return Conformance("mine", "engine", {"torch": "2"}, tallies=tallies)


def test_a_section_and_all_entries() -> None:
    section = conformance_split.section("mine", run())
    assert section.startswith("## mine\n\nmine on engine: does not conform.")
    assert "off by 2 steps: `add`, `mul` and 2 more\n" in section
    rows = list(csv.DictReader(conformance_split.entries(run()).splitlines()))
    assert [row["entry"] for row in rows] == ["add", "mul", "sub", "neg", "relu"]
    assert rows[3]["reason"].endswith("off by 2 steps; twice") and not rows[4]["reason"]
    assert rows[4]["dtypes"] == "int8 (relu)"


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_section_is_replaced_in_its_place(name: str) -> None:
    page = "# Page\n\n## first\n\none\n\n## second\n\ntwo\n"
    again = conformance_split.replaced(page, name, f"## {name}\n\nnew\n")
    assert again.count(f"## {name}\n\nnew\n") == 1 and again.index("first") < again.index("second")
    assert conformance_split.replaced(page, "third", "## third\n").endswith("two\n\n## third\n")


def test_each_section_has_its_entries() -> None:
    names = re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)
    assert len(names) == 26
    for name in names:
        lines = (
            (ROOT / f"docs/conformance/entries/{name}.csv").read_text(encoding="utf-8").splitlines()
        )
        assert lines[0] == ",".join(conformance_split.COLUMNS) and len(lines) > 5
        assert f"[{name}.csv](entries/{name}.csv)" in PAGE
