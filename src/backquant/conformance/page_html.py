"""The page of a run as HTML: entries with the same dtype configs stand in one table, by what they claim."""

from __future__ import annotations

from typing import Any

import jinja2

from backquant.conformance.case import FAILURES, Verdict
from backquant.conformance.page import (
    HOW_TO_READ,
    Block,
    blocks,
    cell_text,
    headline,
    reasons,
    short,
)
from backquant.conformance.results import Conformance, Tally

_PAGE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ found.backend }} on {{ found.engine }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: #222; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h1 small { font-weight: 600; font-size: 1.1rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; } .about, .read { color: #666; margin-top: .2rem; }
.cards { display: flex; gap: .8rem; flex-wrap: wrap; margin: 1.2rem 0; }
.card { border: 1px solid #ddd; border-radius: 8px; padding: .5rem 1rem; }
.card b { display: block; font-size: 1.3rem; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th { text-align: left; vertical-align: bottom; font-size: .8rem; font-weight: 600; }
thead { position: sticky; top: 0; background: #fff; box-shadow: 0 1px 0 #bbb; }
td, th { padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #eee; overflow-wrap: anywhere; }
.p { width: 38%; } td.p { font-family: ui-monospace, monospace; font-size: .82rem; }
.k { width: 24%; } td.k { color: #666; font-size: .8rem; }
td.good { color: #14702b; } td.bad { color: #a8180d; font-weight: 600; } td.none { color: #999; }
td.narrow { color: #14702b; } td.narrow::after { content: " · too narrow"; color: #8a5b00; font-size: .8rem; }
.good { color: #14702b; } .bad { color: #a8180d; } .none { color: #777; }
ul { padding-left: 0; } li { margin: .3rem 0; list-style: none; }
summary { cursor: pointer; } code { font-size: .82rem; }
</style></head><body>
<h1>{{ found.backend }} on {{ found.engine }} <small class="{{ colour }}">
{{- headline }}</small></h1>
<p class="about">{{ versions }} · {{ found.date }} · seed {{ found.seed }}
{%- if not found.complete %} · the time was up before all cases were run{% endif %}</p>
<div class="cards">
{% for label, number in cards %}<div class="card"><b>{{ number }}</b>{{ label }}</div>
{% endfor %}</div>
<p class="read">{{ read }}</p>
{% for title, group in told %}
<h2>{{ title }}</h2>
<ul>
{% for each in group %}
<li><details><summary>{{ each.verdict.value }}: {{ each.why }} <span class="about">({{ each.dtypes }};
{{ each.patterns | length }} {{ "entry" if each.patterns | length == 1 else "entries" }})</span></summary>
{% for pattern in each.patterns %}<code>{{ pattern }}</code>{{ ", " if not loop.last }}{% endfor %}
</details></li>
{% endfor %}
</ul>
{% endfor %}
{% for block in blocks %}
<h2>{{ block.title }}</h2>
<table><thead><tr><th class="p">entry</th>{% for c in block.columns %}<th>{{ c }}</th>{% endfor %}
<th class="k">kernel</th></tr></thead>
{% for name, cells, kernel in block.rows %}
<tr><td class="p">{{ name }}</td>
{% for kind, text, why in cells %}
<td class="{{ kind }}"{% if why %} title="{{ why }}"{% endif %}>{{ text }}</td>
{% endfor %}
<td class="k">{{ kernel }}</td></tr>
{% endfor %}
</table>
{% endfor %}
</body></html>
"""
)


def _shown(block: Block) -> dict[str, Any]:
    rows = [
        (short(row.pattern), [_cell(cell) for cell in row.cells], row.kernel) for row in block.rows
    ]
    return {"title": block.title, "columns": block.columns, "rows": rows}


def _cell(tally: Tally | None) -> tuple[str, str, str]:
    """Its class, what it says, and its reason."""
    if tally is None:
        return "none", "", ""
    if tally.verdict is Verdict.TOO_NARROW:
        return "narrow", cell_text(tally).replace(" (too narrow)", ""), tally.why
    if tally.verdict in FAILURES:
        return "bad", cell_text(tally), tally.why
    kind = "none" if tally.verdict is Verdict.UNTRIED else "good"
    return kind, cell_text(tally), tally.why


def to_html(found: Conformance) -> str:
    """The page as HTML; a cell tells its reason when it is pointed at.

    >>> "<small class=\\"none\\">nothing was computed</small>" in to_html(Conformance("x86", "x86", {}))
    True
    """
    integers = [
        ("of the integers equal", f"{found.bit_equal:.3%}"),
        ("steps at worst", f"{found.worst:g}"),
    ]
    cards: list[tuple[str, Any]] = [
        ("cases", f"{found.cases:,}"),
        *(integers if found.computed else []),
        *((v.value, f"{n:,}") for v, n in sorted(found.counts.items(), key=lambda pair: -pair[1])),
    ]
    page: str = _PAGE.render(
        found=found,
        versions=" · ".join(f"{name} {version}" for name, version in found.versions.items()),
        cards=cards,
        read=HOW_TO_READ,
        told=list(reasons(found)),
        blocks=[_shown(block) for block in blocks(found)],
        headline=headline(found),
        colour="bad" if not found.conforms else "good" if found.computed else "none",
    )
    return page
