"""Try PyTorch's own backend configs on the kernels behind them, and write docs/conformance.

    python -m tools.conformance_pages                       # all of them, ten minutes each at most
    python -m tools.conformance_pages --minutes 3 x86

Writes a page for each backend, ``findings.md`` with a script for each kind of failure, and the table engine ×
outcome in ``README.md``. ``outcomes`` of a run that was ended lie in ``--work``; the same call goes on there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.torch_specs import torch_spec

import backquant
from backquant.conformance import Conformance
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance.case import Outcome
from backquant.conformance.reproducer import script

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "conformance"
BACKENDS = ("x86", "onednn", "fbgemm", "qnnpack", "native", "executorch")
_FINDINGS = 36


def tried(name: str, work: Path, options: argparse.Namespace) -> Conformance:
    """The run of one backend, begun or gone on with in ``work``."""
    return backquant.conform(
        torch_spec(name),
        minutes=options.minutes,
        rounds=options.rounds,
        jobs=options.jobs,
        output=work / f"pytorch_{name}",
        resume=True,
    )


def beyond_tried(run: Conformance, work: Path) -> int:
    """Of how many claims the refused side was tried, too."""
    with (work / f"pytorch_{run.backend}" / "outcomes.jsonl").open(encoding="utf-8") as lines:
        done = (json.loads(line).get("done", "") for line in lines)
        return sum(key.endswith(" beyond") for key in done)


def index(runs: Sequence[Conformance], work: Path) -> Iterator[str]:
    """The table engine × outcome."""
    verdicts = [v for v in Verdict if any(run.counts[v] for run in runs)]
    yield "# PyTorch's backend configs, judged"
    yield ""
    yield (
        "What `torch.ao.quantization.backend_config` claims, tried on the kernels behind it. Ours claim what "
        "is kept: `tests/unkept.py` lists where they differ. Written by `python -m tools.conformance_pages`; "
        "[conformance.md](../conformance.md) has the words. `tensorrt` and `qnnpack_pt2e` have no kernels in "
        "PyTorch and are not judged; `executorch` is tried on qnnpack's."
    )
    yield ""
    heads = (
        "description",
        "cases",
        *(v.value for v in verdicts),
        "integers equal",
        "steps at worst",
        "claims, of them also beyond",
    )
    yield f"| {' | '.join(heads)} |"
    yield "| --- " * len(heads) + "|"
    for run in runs:
        counts = (f"{run.counts[v]:,}" for v in verdicts)
        cells = (
            f"[{run.backend}]({run.backend}.md)",
            f"{run.cases:,}",
            *counts,
            f"{run.bit_equal:.3%}",
            f"{run.worst:g}",
            f"{len(run.tallies)}, {beyond_tried(run, work)}",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "[Findings](findings.md), a script each. [Runtimes of exports, compiled code](targets.md)."


def findings(runs: Sequence[Conformance]) -> Iterator[str]:
    """The first failure of each kind (verdict and reason), with its script."""
    yield "# Findings"
    seen: set[tuple[str, str]] = set()
    for run in runs:
        for outcome in run.failures:
            kind = (outcome.verdict.value, outcome.detail.partition(";")[0])
            if kind in seen or len(seen) >= _FINDINGS:
                continue
            seen.add(kind)
            yield ""
            yield f"## {outcome.pattern} on {run.engine}: {outcome.verdict.value}"
            yield ""
            yield outcome.detail or f"{outcome.steps:g} steps off, {outcome.limit:g} are stated."
            yield ""
            yield f"```python\n{_script(outcome, run).rstrip()}\n```"


def _script(outcome: Outcome, run: Conformance) -> str:
    """The script, which makes the description from PyTorch's own; it runs in a checkout."""
    text = script(outcome, torch_spec(run.backend), run.versions)
    imported = "from backquant.conformance.reproducer import repeat\n"
    text = text.replace(imported, f"{imported}from tools.torch_specs import torch_spec\n")
    return text.replace(f"repeat({run.backend!r},", f"repeat(torch_spec({run.backend!r}),")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="*", default=BACKENDS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "conformance")
    options = parser.parse_args()
    PAGES.mkdir(exist_ok=True)
    runs = []
    for name in options.backends:
        run = tried(name, options.work, options)
        print(run, flush=True)
        run.save_markdown(PAGES / f"{name}.md")
        runs.append(run)
    for page, lines in (("README.md", index(runs, options.work)), ("findings.md", findings(runs))):
        (PAGES / page).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
