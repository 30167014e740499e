"""docs/hardware.md: every row tried, what it is described by, and what is said where it is not kept.

python -m tools.hardware.table          # tries the rows, and writes the page
"""

from __future__ import annotations

from pathlib import Path

from tools.hardware.row import Row
from tools.hardware.rows import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hardware.md"
CELLS = ("expressible", "enforced", "honoured", "message")
INTRODUCTION = """\
# What hardware asks, and how it is said

<!-- Written by `python -m tools.hardware.table`; edit tools/hardware/rows.py instead. -->

Constraints from the documents of hardware vendors. Each is tried in four ways, a test for each cell:

- **expressible**: a description says it, `check` finds nothing wrong, and it comes back as it was saved;
- **enforced**: what keeps to it is quantized, what does not stays float for this reason;
- **honoured**: the reference model has the dtypes, scales, biases and roundings that are described;
- **message**: what is asked, what is admitted and the fix, as below.

The models are single operators; descriptions of whole chips on stock models are in [vendors.md](vendors.md),
the fields in [spec-files.md](spec-files.md).
"""


def section(row: Row) -> str:
    """The part of the page about a row."""
    parts = [f"## {row.constraint}", "", row.who, "", "```text", row.spec.strip(), "```", ""]
    return "\n".join([*parts, "Where it is not kept:", "", "```text", row.message(), "```", ""])


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
    head = f"| constraint | who | {' | '.join(CELLS)} |"
    lines = [INTRODUCTION, head, f"| --- | --- {'| --- ' * len(CELLS)}|"]
    for row in ROWS:
        for cell in CELLS:
            tried(row, cell)
        lines.append(f"| {row.constraint} | {row.who} | {' | '.join(['yes'] * len(CELLS))} |")
    return "\n".join([*lines, "", *map(section, ROWS)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
