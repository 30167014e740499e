"""The page of one run of ``conform``, divided: a section for people, and all entries as CSV.

The section has the counts and the reasons with the number of their entries; the CSV has a row for each entry
and dtype config with its result, kernel and reason.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

SHOWN = 2  # entries of a reason
MOST = 2  # reasons below a heading
COLUMNS = ("entry", "dtypes", "result", "kernel", "reason")
_REASON = re.compile(
    r"^- (?P<why>.*) \((?P<dtypes>[^()]*(?:\([^()]*\)[^()]*)*)\): (?P<names>`.*`)$"
)


def section(page: str, text: str) -> str:
    """``## page``, and below it what people read."""
    title, about, counts, rest = _parts(text)
    lines = [f"## {page}", "", f"{title}. {about}", "", " ".join([counts, *rest]), ""]
    for heading, reasons in _reasons(text).items():
        lines += [f"{heading}:", ""]
        for why, names in list(reasons.items())[:MOST]:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"- {why}: {', '.join(f'`{name}`' for name in names[:SHOWN])}{more}")
        if len(reasons) > MOST:
            lines.append(f"- {len(reasons) - MOST} other reasons")
        lines.append("")
    return "\n".join([*lines, f"All entries: [{page}.csv](entries/{page}.csv)."]) + "\n"


def _reasons(text: str) -> dict[str, dict[str, list[str]]]:
    """By heading: each reason, whatever the dtypes, with its entries."""
    headings: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif found := _REASON.match(line):
            names = headings.setdefault(heading, {}).setdefault(found["why"].partition(";")[0], [])
            names += [
                name for name in re.findall(r"`([^`]*)`", found["names"]) if name not in names
            ]
    return headings


def replaced(page: str, name: str, new: str) -> str:
    """The page with the section ``name`` as it is now, in its place or at the end."""
    begin = page.find(f"## {name}\n")
    if begin < 0:
        return f"{page}\n{new}"
    end = page.find("\n## ", begin)
    return page[:begin] + new + (page[end:] if end >= 0 else "")


def entries(text: str) -> str:
    """The CSV."""
    reasons = {}
    for found in filter(None, map(_REASON.match, text.splitlines())):
        for name in re.findall(r"`([^`]*)`", found["names"]):
            reasons[name, found["dtypes"]] = found["why"]
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(COLUMNS)
    for name, dtypes, result, kernel in _rows(text):
        rows.writerow((name, dtypes, result, kernel, reasons.get((name, dtypes), "")))
    return written.getvalue()


def _parts(text: str) -> tuple[str, str, str, list[str]]:
    """Title, versions, counts in one line, and how near the integers are where any were computed."""
    lines = text.splitlines()
    counts = re.findall(r"^\| ([^|]+) \| ([\d,]+) \|$", text.partition("\n## ")[0], re.MULTILINE)
    summed = ", ".join(f"{name} {count}" for name, count in counts)
    near = [line.partition(" ✔")[0] for line in lines if "of the integers equal" in line]
    return lines[0].removeprefix("# "), lines[2], f"Cases: {summed}.", near


def _rows(text: str) -> Iterator[tuple[str, str, str, str]]:
    for block in re.split(r"^## (?=\d[\d,]* entr)", text, flags=re.MULTILINE)[1:]:
        dtypes = re.findall(r"^\(\d+\) (.*?)\s*$", block, re.MULTILINE)
        dtypes = dtypes or [block.splitlines()[0].partition(": ")[2]]
        for line in block.splitlines():
            if line.startswith("| `"):
                name, *cells, kernel = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                for dtype, cell in zip(dtypes, cells, strict=True):
                    yield name.strip("`"), dtype, cell, kernel.replace("\\|", "|")
