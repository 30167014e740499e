"""The tables of docs/conformance/README.md: engine × outcome, by what lies in the folders of runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.vela.agreement import RECORDED, compared

from backquant import BackendConfig, get_backend_config
from backquant.conformance import Conformance
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance.plan import claims, trials


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


def outcomes(rows: Sequence[Tried], rounds: int) -> Iterator[str]:
    """The table engine × outcome."""
    verdicts = [v for v in Verdict if any(row.run.counts[v] for row in rows)]
    yield from _table(
        "description, engine",
        *("accepted trials", "refused trials", "cases"),
        *(v.value for v in verdicts),
        *("integers equal", "steps at worst", "versions, date"),
        rows=[
            (
                f"[{row.run.backend}, {row.run.engine}]({row.page}.md)",
                *sides(row, rounds),
                f"{row.run.cases:,}",
                *(f"{row.run.counts[v]:,}" for v in verdicts),
                f"{row.run.bit_equal:.3%}",
                f"{row.run.worst:g}",
                _versions(row.run),
            )
            for row in rows
        ],
    )


def compilers() -> Iterator[str]:
    """What compilers say whose integers nobody computes here: Vela, asked about operators on both sides of
    each limit; TensorRT, by its rules alone."""
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
    entries = len(get_backend_config("tensorrt").configs)
    rows.append((f"`tensorrt`, {entries} entries", *("not run: it needs a GPU", "", "", "")))
    yield from _table(
        "description, compiler",
        *("both take it", "both leave it", "refused, and taken", "claimed, and left"),
        rows=rows,
    )


_PAIRS = ((True, True), (False, False), (True, False), (False, True))


def _versions(run: Conformance) -> str:
    own = (f"{k} {v}" for k, v in run.versions.items() if k not in ("backquant", "python"))
    return f"{', '.join(own)}; {run.date}"


def _table(*heads: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "| --- " * len(heads) + "|"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"
