"""docs/hardware.md: every row tried, what it is described by, and what is said where it is not kept.

python -m tools.hardware.table          # tries the rows, and writes the page
"""

from __future__ import annotations

import re
from pathlib import Path

from tools.hardware.row import Row
from tools.hardware.rows import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hardware.md"
CELLS = ("expressible", "enforced", "honoured", "message")
INTRODUCTION = """\
# Constraints of hardware, and how a description states them

<!-- Written by `python -m tools.hardware.table`; edit tools/hardware/rows.py instead. -->

Constraints from the documents of hardware vendors. For each a test shows that a description states
it and is saved and read unchanged, that what violates it stays float for this reason, that the
reference model has these dtypes, scales, biases and roundings, and that the message says what is
requested, what is supported, and a fix.

The models are single operators; descriptions of whole chips on stock models are in [vendors.md](vendors.md),
the fields in [spec-files.md](spec-files.md).
"""


def section(row: Row) -> str:
    """The part of the page about a row."""
    parts = [f"## {row.constraint}", "", row.who, "", "```text", row.spec.strip(), "```", ""]
    said = re.sub(r"\nfix .*(\n {4,}.*)*", "", f"\n{row.message()}").strip("\n")
    return "\n".join([*parts, "Otherwise (with a fix as code):", "", "```text", said, "```", ""])


def tried(row: Row, cell: str) -> None:
    """Raise AssertionError where a cell is not a yes."""
    if cell == "honoured":
        assert row.honoured(row.result)
    elif cell == "message":
        assert all(reason.asked and reason.admitted for reason in row.refusals.values())
    else:
        getattr(row, cell)()


def page() -> str:
    """The whole page; raises AssertionError where a cell is not a yes."""
    lines = [INTRODUCTION]
    for row in ROWS:
        for cell in CELLS:
            tried(row, cell)
    return "\n".join([*lines, "", *map(section, ROWS)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
