"""The tables of docs/conformance/README.md: engine × outcome, by what lies in the folders of runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.vela.agreement import RECORDED, compared

from backquant import BackendConfig
from backquant.conformance import Conformance
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance.run import claims, trials


@dataclass(frozen=True)
class Tried:
    """A run as a row: its page, the description, and the folder with its outcomes."""

    page: str
    run: Conformance
    backend: BackendConfig
    folder: Path


def sides(tried: Tried, rounds: int) -> tuple[str, str]:
    """Of how many trials of either side there are outcomes."""
    with (tried.folder / "outcomes.jsonl").open(encoding="utf-8") as lines:
        done = {json.loads(line).get("done", "") for line in lines}
    wanted = list(trials(claims(tried.backend), rounds, 0))
    keys = {
        side: [trial.key for trial in wanted if trial.side.value == side]
        for side in ("accepted", "refused")
    }
    accepted, refused = (
        f"{sum(key in done for key in keys[side])} of {len(keys[side])}" for side in keys
    )
    return accepted, refused


_FIRST = "description, engine"
Row = dict[str, str]


def outcomes(
    pages: Sequence[str], rows: Sequence[Tried], rounds: int, before: Sequence[Row]
) -> Iterator[str]:
    """The table engine × outcome, a row for each of ``pages``: that of its run, else that of ``before``."""
    known = {
        page: row
        for row in before
        for page in pages
        if f"](engines.md#{page})" in row.get(_FIRST, "")
    }
    known |= {row.page: _row(row, rounds) for row in rows}
    made = [known[page] for page in pages if page in known]
    words = [v.value for v in Verdict]
    used = [w for w in words if any(row.get(w, "0") != "0" for row in made)]
    columns = [_FIRST, "accepted trials", "refused trials", "cases", *used, *_LAST]
    lines = [tuple(row.get(name, "0") for name in columns) for row in made]
    yield from _table(*columns, rows=lines)


_LAST = ("integers equal", "steps at worst", "versions, date")


def _row(tried: Tried, rounds: int) -> Row:
    run = tried.run
    accepted, refused = sides(tried, rounds)
    integers = (
        (f"{run.bit_equal:.3%}", f"{run.worst:g}") if run.computed else ("none computed", "–")
    )
    return {
        _FIRST: f"[{run.backend}, {run.engine}](engines.md#{tried.page})",
        "accepted trials": accepted,
        "refused trials": refused,
        "cases": f"{run.cases:,}",
        **{v.value: f"{run.counts[v]:,}" for v in Verdict},
        **dict(zip(_LAST, (*integers, _versions(run)), strict=True)),
    }


def rows_before(text: str) -> list[Row]:
    """The rows of all tables of a page, by the names of their columns.

    >>> rows_before("| a | b |\\n| --- | --- |\\n| 1 | 2 |")
    [{'a': '1', 'b': '2'}]
    """
    found: list[Row] = []
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells:
            names = []
        elif not names:
            names = cells
        elif set(cells) != {"---"}:
            found.append(dict(zip(names, cells, strict=False)))
    return found


def compilers() -> Iterator[str]:
    """What Vela says, asked about operators of TFLite files on both sides of each limit."""
    counts: Counter[tuple[str, bool, bool]] = Counter()
    for accelerator, _, theirs, ours, _ in compared():
        counts[accelerator, theirs, ours] += 1
    version = json.loads(RECORDED.read_text(encoding="utf-8"))["vela"]
    rows = [
        (
            f"`{name}.yaml`, Vela {version}",
            *(f"{counts[(accelerator, *pair)]:,}" for pair in _PAIRS),
        )
        for accelerator, name in (("EthosU55", "ethos_u55"), ("EthosU85", "ethos_u85"))
    ]
    yield from _table(
        "description, compiler",
        *("both take it", "both leave it", "refused, and taken", "claimed, and left"),
        rows=rows,
    )


_PAIRS = ((True, True), (False, False), (True, False), (False, True))


def _versions(run: Conformance) -> str:
    own = (f"{k} {v}" for k, v in run.versions.items() if k not in ("backquant", "python"))
    return f"{', '.join(own)}; seed {run.seed}, {run.date}"


def _table(*heads: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "| --- " * len(heads) + "|"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"
