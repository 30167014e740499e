"""PyTorch's backend configs on several versions of its kernels; docs/conformance/torch_versions.md.

    python -m tools.conformance_versions run --work DIR                  # with the PyTorch that runs this
    python -m tools.conformance_versions render

``run`` tries each config, goes on with what lies in ``--work``, and keeps a line for each in
docs/conformance/torch_versions.jsonl: its counts, and what fails.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.conformance_pages import PAGES, PYTORCH
from tools.conformance_table import Tried, sides
from tools.torch_specs import torch_spec

import backquant
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance.results import Outcome

LINES, PAGE = PAGES / "torch_versions.jsonl", PAGES / "torch_versions.md"
#: The version of which the other pages are.
CI = "2.13.0"
_QUIET = (Verdict.CONFORMS, Verdict.TOO_NARROW)
Line = dict[str, Any]
_INTRODUCTION = f"""\
# PyTorch's backend configs on several versions of PyTorch

Written by `python -m tools.conformance_versions render` from torch_versions.jsonl; [README.md](README.md) has
the words, and the pages with each entry of torch {CI}. Each config is that of the version beside it."""


def line(tried: Tried) -> Line:
    """What is kept of a run: counts, and each kind of what does not conform."""
    accepted, refused = sides(tried, 1)
    kinds = Counter(_kind(one) for one in tried.run.outcomes if one.verdict not in _QUIET)
    return {
        "torch": tried.run.versions["torch"],
        "python": tried.run.versions["python"],
        "spec": tried.page,
        "seed": tried.run.seed,
        "date": tried.run.date,
        "engine": tried.run.engine,
        "accepted": accepted,
        "refused": refused,
        "counts": {v.value: tried.run.counts[v] for v in Verdict if tried.run.counts[v]},
        "bit_equal": tried.run.bit_equal if tried.run.computed else None,
        "worst": tried.run.worst,
        "kinds": [[*kind, cases] for kind, cases in sorted(kinds.items())],
    }


def _kind(outcome: Outcome) -> tuple[str, str, str]:
    return outcome.verdict.value, outcome.pattern, outcome.detail or f"{outcome.steps:g} steps off"


def run(name: str, options: argparse.Namespace) -> Line:
    """Try one config, or go on with it; the line of what is there."""
    spec = torch_spec(name)
    folder = options.work / name
    tried = backquant.conform(
        spec,
        minutes=options.minutes,
        seed=options.seed,
        rounds=1,
        jobs=options.jobs,
        output=folder,
        resume=True,
    )
    return line(Tried(name, tried, spec, folder))


def lines(path: Path) -> list[Line]:
    """The lines of a file; none where it does not exist."""
    if not path.exists():
        return []
    return [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines() if one]


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The table config × version, and what fails in one version and not in another.

    >>> page([]).splitlines()[0]
    "# PyTorch's backend configs on several versions of PyTorch"
    """
    return "\n".join([_INTRODUCTION, "", *_table(found), "", *_differences(found)]) + "\n"


def _table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    used = [v.value for v in Verdict if any(v.value in one["counts"] for one in found)]
    heads = (
        "config",
        "torch",
        "accepted trials",
        "refused trials",
        *used,
        "integers equal",
        "steps at worst",
    )
    yield f"| {' | '.join((*heads, 'Python, date'))} |"
    yield "| --- " * (len(heads) + 1) + "|"
    for one in sorted(found, key=_order):
        equal = "none computed" if one["bit_equal"] is None else f"{one['bit_equal']:.3%}"
        cells = (
            one["spec"],
            one["torch"],
            one["accepted"],
            one["refused"],
            *(f"{one['counts'].get(word, 0):,}" for word in used),
            equal,
            f"{one['worst']:g}",
            f"{one['python']}, {one['date']}",
        )
        yield f"| {' | '.join(cells)} |"


def _differences(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"## What fails elsewhere and not in {CI}, and the other way round"
    yield ""
    ours = {one["spec"]: _kinds(one) for one in found if _plain(one["torch"]) == CI}
    told = [
        f"- {one['spec']}, torch {where}: {verdict}: `{pattern}`: {detail}"
        for one in sorted(found, key=_order)
        if one["spec"] in ours
        for where, kinds in (
            (_plain(one["torch"]), _kinds(one) - ours[one["spec"]]),
            (f"{CI} and not {_plain(one['torch'])}", ours[one["spec"]] - _kinds(one)),
        )
        for verdict, pattern, detail in sorted(kinds)
    ]
    yield from told or ["Nothing."]


def _kinds(one: Mapping[str, Any]) -> set[tuple[str, str, str]]:
    return {(verdict, pattern, detail) for verdict, pattern, detail, _ in one["kinds"]}


def _order(one: Mapping[str, Any]) -> tuple[int, list[int]]:
    return PYTORCH.index(one["spec"]), [int(part) for part in _plain(one["torch"]).split(".")]


def _plain(version: str) -> str:
    return version.partition("+")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("render")
    trying = commands.add_parser("run")
    trying.add_argument("names", nargs="*", default=PYTORCH, metavar="CONFIG")
    trying.add_argument("--work", type=Path, required=True)
    trying.add_argument("--minutes", type=float, default=10.0)
    trying.add_argument("--seed", type=int, default=1611)
    trying.add_argument("--jobs", type=int)
    options = parser.parse_args()
    if options.command == "run":
        for name in options.names:
            _keep(run(name, options))
    PAGE.write_text(page(lines(LINES)), encoding="utf-8")


def _keep(made: Line) -> None:
    """Replace the line of the same config and version."""
    others = [x for x in lines(LINES) if (x["spec"], x["torch"]) != (made["spec"], made["torch"])]
    text = "".join(json.dumps(one) + "\n" for one in [*others, made])
    LINES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
