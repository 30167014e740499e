"""Which field says each constraint of Vela's report: ``constraints.yaml``, checked.

vela --supported-ops-report
python -m tools.vela.constraints SUPPORTED_OPS.md     # every constraint of the report is in the list
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import yaml

__all__ = ["listed", "missing_fields", "of_report"]

_LIST = Path(__file__).with_name("constraints.yaml")
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "backends"


def listed() -> list[dict[str, Any]]:
    """The list."""
    found: list[dict[str, Any]] = yaml.safe_load(_LIST.read_text(encoding="utf-8"))
    return found


def missing_fields() -> list[str]:
    """What the list says that the examples say, and they do not."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(_EXAMPLES.glob("ethos_u*.yaml"))]
    said = [text for row in listed() for text in row.get("said", ())]
    fields = [text for text in said if text != "no entry" and not text.startswith("always")]
    return [text for text in fields if not any(text in each for each in texts)]


def of_report(report: str) -> dict[str, int]:
    """The digest of each distinct constraint, and in how many lines of the report it stands."""
    constraints: list[list[str]] = []
    inside = False
    for line in report.splitlines():
        if line.startswith("- ") and "](#" not in line:
            constraints.append([line])
        elif not (inside and line.startswith(" ")):
            inside = False
            continue
        else:
            constraints[-1].append(line)
        inside = True
    counts: dict[str, int] = {}
    for lines in constraints:
        text = re.sub(r"\s+", " ", "\n".join(lines)).strip()
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        counts[digest] = counts.get(digest, 0) + 1
    return counts


def main() -> int:
    """Compare the list with a report; the number of differences."""
    known, report = {row["id"] for row in listed()}, of_report(Path(sys.argv[1]).read_text("utf-8"))
    wrong = [*(f"not in the list: {digest}" for digest in report if digest not in known)]
    wrong += [f"not in the report: {digest}" for digest in known if digest not in report]
    wrong += [f"not in the examples: {text}" for text in missing_fields()]
    rows = listed()
    cannot = [row for row in rows if "cannot" in row]
    print(
        f"{len(rows) - len(cannot)} of {len(rows)} distinct constraints can be said",
        *wrong,
        sep="\n",
    )
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
