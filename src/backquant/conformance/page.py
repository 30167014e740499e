"""Pages of a run: a matrix of entries and dtypes, as Markdown and as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2

from backquant.conformance.case import Verdict
from backquant.conformance.results import Conformance, Tally

_MARKS = {
    Verdict.CONFORMS: "✔",
    Verdict.TOO_NARROW: "✔ (too narrow)",
    Verdict.WRONG: "✘ wrong",
    Verdict.REFUSED_BY_ENGINE: "✘ refused by engine",
    Verdict.NOT_INTEGER: "✘ not integer",
    Verdict.UNPREDICTABLE: "✘ unpredictable",
    Verdict.UNTRIED: "– not tried",
}


@dataclass(frozen=True)
class _Row:
    pattern: str
    cells: tuple[Tally | None, ...]

    @property
    def verdict(self) -> Verdict:
        order = list(_MARKS)
        return max((cell.verdict for cell in self.cells if cell is not None), key=order.index)


def _table(found: Conformance) -> tuple[list[str], list[_Row]]:
    """The columns, dtype configs in the order in which they come, and a row for each entry."""
    columns = list(dict.fromkeys(tally.dtypes for tally in found.tallies.values()))
    patterns = list(dict.fromkeys(tally.pattern for tally in found.tallies.values()))
    rows = [
        _Row(pattern, tuple(found.tallies.get((pattern, dtypes)) for dtypes in columns))
        for pattern in patterns
    ]
    return columns, rows


def _short(pattern: str) -> str:
    """Without the packages: ``nn.ReLU(nn.Conv2d)``."""
    return re.sub(r"\b(torch|backquant)\.(?=nn\b)", "", pattern).replace("nn.functional.", "F.")


def _cell(tally: Tally | None) -> str:
    if tally is None:
        return ""
    text = _MARKS[tally.verdict]
    if tally.verdict in (Verdict.CONFORMS, Verdict.TOO_NARROW) and tally.elements:
        text += " exact" if not tally.different else f" ≤ {tally.worst:.2g}"
    return text


def to_markdown(found: Conformance) -> str:
    """The page as Markdown.

    >>> print(to_markdown(Conformance("x86", "x86", {"torch": "2.13.0"})).splitlines()[0])
    # x86 on x86
    """
    return "\n".join(_markdown(found)) + "\n"


def _markdown(found: Conformance) -> Iterator[str]:
    counts = found.counts
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    yield f"# {found.backend} on {found.engine}"
    yield ""
    yield f"{versions}; {found.date}, seed {found.seed}."
    yield ""
    yield "| outcome | cases |"
    yield "| --- | --- |"
    for verdict in Verdict:
        if counts[verdict]:
            yield f"| {verdict.value} | {counts[verdict]:,} |"
    yield ""
    yield (
        f"{found.bit_equal:.3%} of the integers equal the integer reference's; the worst is {found.worst:g} "
        "steps off. ✔ exact: all of them equal; ≤ n: off by at most n steps (float results: 255ths of their "
        "range)."
    )
    columns, rows = _table(found)
    yield ""
    yield " | ".join(["| entry", *(f"({index})" for index, _ in enumerate(columns, 1)), "kernel |"])
    yield "| --- " * (len(columns) + 2) + "|"
    for row in rows:
        kernel = next((cell.kernel for cell in row.cells if cell is not None and cell.kernel), "")
        cells = [_cell(cell) for cell in row.cells]
        shown = kernel.replace("|", "\\|")
        yield " | ".join([f"| `{_short(row.pattern)}`", *cells, f"{shown} |"])
    yield ""
    yield from (f"({index}) {dtypes}  " for index, dtypes in enumerate(columns, 1))
    bad = [t for t in found.tallies.values() if t.verdict is not Verdict.CONFORMS]
    if bad:
        yield ""
        yield "## What does not conform"
        yield ""
        for tally in bad:
            where = f"`{_short(tally.pattern)}`, {tally.dtypes}"
            yield f"- {where}: {tally.verdict.value}: {tally.why}"


_PAGE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ found.backend }} on {{ found.engine }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; color: #222; }
h1 { font-size: 1.5rem; margin-bottom: 0; } .about { color: #666; margin-top: .2rem; }
.cards { display: flex; gap: 1rem; flex-wrap: wrap; margin: 1.2rem 0; }
.card { border: 1px solid #ddd; border-radius: 8px; padding: .6rem 1rem; }
.card b { display: block; font-size: 1.3rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; vertical-align: bottom; }
td, th { padding: .25rem .6rem; border-bottom: 1px solid #eee; }
td.p { font-family: ui-monospace, monospace; font-size: .85rem; }
td.k { color: #666; font-size: .8rem; } tr.head { position: sticky; top: 0; background: #fff; }
.good { color: #14702b; } .bad { color: #a8180d; font-weight: 600; } .none { color: #999; }
.narrow { color: #8a5b00; }
</style></head><body>
<h1>{{ found.backend }} on {{ found.engine }}: {{ "conforms" if found.conforms else "does not conform" }}</h1>
<p class="about">{{ versions }} · {{ found.date }} · seed {{ found.seed }}</p>
<div class="cards">
{% for label, number in cards %}<div class="card"><b>{{ number }}</b>{{ label }}</div>
{% endfor %}</div>
<table><tr class="head"><th>entry</th>{% for c in columns %}<th>{{ c }}</th>{% endfor %}<th>kernel</th></tr>
{% for name, cells, kernel in rows %}
<tr><td class="p">{{ name }}</td>
{% for kind, text, why in cells %}<td class="{{ kind }}" title="{{ why }}">{{ text }}</td>{% endfor %}
<td class="k">{{ kernel }}</td></tr>
{% endfor %}
</table></body></html>
"""
)
_KINDS = {
    Verdict.CONFORMS: "good",
    Verdict.TOO_NARROW: "narrow",
    Verdict.UNTRIED: "none",
}


def to_html(found: Conformance) -> str:
    """The page as HTML; a cell tells its reason when it is pointed at.

    >>> "<h1>x86 on x86: conforms</h1>" in to_html(Conformance("x86", "x86", {}))
    True
    """
    columns, rows = _table(found)
    shown = []
    for row in rows:
        cells = [
            ("none", "", "")
            if cell is None
            else (_KINDS.get(cell.verdict, "bad"), _cell(cell), cell.why)
            for cell in row.cells
        ]
        kernel = next((cell.kernel for cell in row.cells if cell is not None and cell.kernel), "")
        shown.append((_short(row.pattern), cells, kernel))
    cards = [
        ("cases", f"{found.cases:,}"),
        ("of the integers equal", f"{found.bit_equal:.3%}"),
        ("steps at worst", f"{found.worst:g}"),
        *((v.value, f"{n:,}") for v, n in sorted(found.counts.items(), key=lambda pair: -pair[1])),
    ]
    versions = " · ".join(f"{name} {version}" for name, version in found.versions.items())
    page: str = _PAGE.render(
        found=found, versions=versions, cards=cards, columns=columns, rows=shown
    )
    return page
