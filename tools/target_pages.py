"""Try our descriptions of runtimes on them, and write their pages in docs/conformance, and targets.md.

    python -m tools.target_pages                         # all of them, an hour each at most
    python -m tools.target_pages --minutes 20 openvino   # goes on where the last call ended
    python -m tools.target_pages --minutes 0             # writes the pages of what has run

Outcomes lie in ``--work``, a folder for each. ``targets.md`` has the table engine × outcome.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import backquant
from backquant.conformance import Conformance
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance.plan import claims, trials

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "conformance"
#: By page: the description, and the engine where it is not the description's own.
TARGETS: dict[str, tuple[str, str | None]] = {
    "onnxruntime": ("onnxruntime", None),
    "openvino": ("openvino", None),
    "xnnpack": ("xnnpack", None),
    "inductor_x86": ("inductor_x86", None),
    "compiled": ("x86", "compiled"),
}


def tried(page: str, options: argparse.Namespace) -> Conformance:
    """The run of one target, begun or gone on with."""
    backend, engine = TARGETS[page]
    return backquant.conform(
        backend,
        engine=engine,
        minutes=options.minutes,
        rounds=options.rounds,
        jobs=options.jobs,
        limit=options.limit,
        output=options.work / page,
        resume=True,
    )


def sides(page: str, work: Path, rounds: int) -> str:
    """Of how many trials of either side there are outcomes."""
    with (work / page / "outcomes.jsonl").open(encoding="utf-8") as lines:
        done = {json.loads(line).get("done", "") for line in lines}
    wanted = list(trials(claims(backquant.get_backend_config(TARGETS[page][0])), rounds, 0))
    shown = []
    for side in ("accepted", "refused"):
        keys = [trial.key for trial in wanted if trial.side.value == side]
        shown.append(f"{sum(key in done for key in keys)} of {len(keys)}")
    return " | ".join(shown)


def table(runs: Sequence[tuple[str, Conformance]], options: argparse.Namespace) -> Iterator[str]:
    """The table engine × outcome."""
    yield "# Runtimes of exports, and compiled code"
    yield ""
    yield (
        "Our descriptions on the runtimes that they describe. Written by `python -m tools.target_pages`; "
        "[conformance.md](../conformance.md) has the words. Trials: one claim with one use of its operator, "
        "called five times (accepted side), or all that lies one step beyond one claim (refused side)."
    )
    yield ""
    verdicts = [v for v in Verdict if any(run.counts[v] for _, run in runs)]
    heads = (
        "engine",
        "accepted trials",
        "refused trials",
        "cases",
        *(v.value for v in verdicts),
        "integers equal",
        "steps at worst",
        "versions, date",
    )
    yield f"| {' | '.join(heads)} |"
    yield "| --- " * len(heads) + "|"
    for page, run in runs:
        own = (f"{k} {v}" for k, v in run.versions.items() if k not in ("backquant", "python"))
        cells = (
            f"[{page}]({page}.md)",
            sides(page, options.work, options.rounds),
            f"{run.cases:,}",
            *(f"{run.counts[v]:,}" for v in verdicts),
            f"{run.bit_equal:.3%}",
            f"{run.worst:g}",
            f"{', '.join(own)}; {run.date}",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=tuple(TARGETS))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--limit", type=float, default=90.0)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "conformance")
    options = parser.parse_args()
    runs = []
    for page in TARGETS:
        begun = (options.work / page / "outcomes.jsonl").exists()
        if page in options.targets and (begun or options.minutes):
            run = tried(page, options)
            run.save_markdown(PAGES / f"{page}.md")
            runs.append((page, run))
    (PAGES / "targets.md").write_text("\n".join(table(runs, options)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
