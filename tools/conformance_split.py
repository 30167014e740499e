"""The page of one run of ``conform``, divided: a section for people, and all entries as CSV.

The section has the counts and the reasons with the number of their entries; the CSV has a row for each entry
and dtype config with its result, kernel and reason.
"""

from __future__ import annotations

import csv
import io

from backquant.conformance import Conformance
from backquant.conformance.results import REASONS, Tally, Verdict, short

SHOWN = 2  # entries of a reason
MOST = 2  # reasons below a heading
COLUMNS = ("entry", "dtypes", "result", "kernel", "reason")


def section(page: str, run: Conformance) -> str:
    """``## page``, and below it what people read."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    title = f"{run.backend} on {run.engine}: {run.verdict}"
    part = "" if run.complete else "; the time was up before all cases were run"
    lines = [f"## {page}", "", f"{title}. {versions}; {run.date}, seed {run.seed}{part}.", ""]
    lines += [" ".join(_counts(run)), ""]
    for heading, verdicts in REASONS:
        reasons = _reasons(run, verdicts)
        lines += [f"{heading}:", ""] if reasons else []
        for why, names in list(reasons.items())[:MOST]:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"- {why}: {', '.join(f'`{name}`' for name in names[:SHOWN])}{more}")
        if len(reasons) > MOST:
            lines.append(f"- {len(reasons) - MOST} other reasons")
        lines += [""] if reasons else []
    return "\n".join([*lines, f"All entries: [{page}.csv](entries/{page}.csv)."]) + "\n"


def _counts(run: Conformance) -> list[str]:
    counts = [f"{v.value} {run.counts[v]:,}" for v in Verdict if run.counts[v]]
    words = [f"Cases: {', '.join(counts)}."]
    if run.computed:
        worst = f"{run.worst:g} step{'' if run.worst == 1 else 's'}"
        words.append(
            f"{run.bit_equal:.3%} of the integers equal the integer reference's; the worst is {worst} off."
        )
    return words


def _reasons(run: Conformance, verdicts: tuple[Verdict, ...]) -> dict[str, list[str]]:
    """Each reason, whatever the dtypes, with its entries."""
    reasons: dict[str, list[str]] = {}
    for tally in run.tallies.values():
        if tally.verdict in verdicts:
            names = reasons.setdefault(_why(tally).partition(";")[0], [])
            names += [name for name in [short(tally.pattern)] if name not in names]
    return reasons


def _why(tally: Tally) -> str:
    return f"{tally.verdict.value}: {tally.why}"


def replaced(page: str, name: str, new: str) -> str:
    """The page with the section ``name`` as it is now, in its place or at the end."""
    begin = page.find(f"## {name}\n")
    if begin < 0:
        return f"{page}\n{new}"
    end = page.find("\n## ", begin)
    return page[:begin] + new + (page[end:] if end >= 0 else "")


def entries(run: Conformance) -> str:
    """The CSV."""
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(COLUMNS)
    told = [verdict for _, verdicts in REASONS for verdict in verdicts]
    for tallies in run.claims().values():
        kernel = next((tally.kernel for tally in tallies if tally.kernel), "")
        for one in tallies:
            why = _why(one) if one.verdict in told else ""
            rows.writerow((short(one.pattern), one.dtypes, one.result, kernel, why))
    return written.getvalue()
