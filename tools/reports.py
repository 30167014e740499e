"""What users report, tried: a table of kinds (a file of ``tests/reports`` each) and backends, with outcomes.

Usage: python tools/reports.py [--all] [--only WORD]

Each test is one member of a kind; its column is the backend in the brackets of its name. By default without
the long tests; ``--all`` runs these, too; ``--only`` takes kinds whose name holds a word. Exit status 1 where
a test fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "tests" / "reports"
Table = dict[tuple[str, str], Counter[str]]


def backend_of(name: str) -> str:
    """The backend in the brackets of a test's name, else ``any``.

    >>> backend_of("test_images[x86]"), backend_of("test_fixes"), backend_of("test_it[zero-openvino]")
    ('x86', 'any', 'openvino')
    """
    from backquant import list_backends

    described = {path.stem for path in (ROOT / "examples" / "backends").glob("*.yaml")}
    known = {*list_backends(), *described}
    parts = name.partition("[")[2].rstrip("]").split("-")
    return next((part for part in parts if part in known), "any")


def outcome_of(case: ElementTree.Element) -> str:
    """``ok``, ``failed`` or ``skipped``."""
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "ok"


def table_of(results: Path) -> Table:
    """Counts of outcomes by kind and backend, of a file of results that pytest wrote."""
    found: Table = defaultdict(Counter)
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        kind = case.get("classname", "").rpartition(".")[2].removeprefix("test_").replace("_", " ")
        found[kind, backend_of(case.get("name", ""))][outcome_of(case)] += 1
    return found


def lines_of(table: Table) -> list[str]:
    """One line for each kind and backend."""
    lines = []
    for (kind, backend), counts in sorted(table.items()):
        words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        lines.append(f"{kind:34} {backend:18} {words}")
    return lines


def main() -> int:
    """Run the tests and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="with the long tests")
    parser.add_argument("--only", default="", help="kinds whose name holds this word")
    asked = parser.parse_args()
    files = [str(path) for path in sorted(REPORTS.glob("test_*.py")) if asked.only in path.stem]
    if not files:
        parser.error(f"no kind holds {asked.only!r}")
    long_tests = (ROOT / "tests" / "long_tests.txt").read_text(encoding="utf-8").splitlines()
    left = (
        []
        if asked.all
        else [f"--deselect={line}" for line in long_tests if line.startswith("tests/")]
    )
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n0",
            "-q",
            f"--junitxml={results}",
            *files,
            *left,
        ]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
        table = table_of(results)
    print("\n".join(lines_of(table)))
    return int(any(counts["failed"] for counts in table.values()))


if __name__ == "__main__":
    sys.exit(main())
