"""Try PyTorch's backend configs and our descriptions on the engines behind them; write docs/conformance.

    python -m tools.conformance_pages                       # all of them, ten minutes each at most
    python -m tools.conformance_pages --minutes 3 x86       # goes on where the last call ended
    python -m tools.conformance_pages --minutes 0           # writes the pages of what has run

Writes a section of ``engines.md`` and a CSV of entries for each, ``findings.md`` with a script for each kind
of failure of PyTorch's (once all of these have run), and the tables engine × outcome in ``README.md``.
Outcomes lie in ``--work``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.conformance_split import entries, replaced, section
from tools.conformance_table import Tried, compilers, outcomes, rows_before
from tools.torch_specs import torch_spec

import backquant
from backquant import BackendConfig
from backquant.cli.models import load_backend
from backquant.conformance import Conformance
from backquant.conformance.results import Outcome
from backquant.conformance.run import script

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "conformance"
ENGINES = PAGES / "engines.md"
#: PyTorch's configs, which have sections of their names.
PYTORCH = (
    "x86",
    "onednn",
    "fbgemm",
    "qnnpack",
    "native",
    "executorch",
    "qnnpack_pt2e",
    "tensorrt",
)
_EXAMPLES = "examples/backends"
#: By page: our description (a name, or a file), and the engine where it is not the description's own.
OURS: dict[str, tuple[str, str | None]] = {
    **{f"shipped_{name}": (name, None) for name in PYTORCH[:6]},
    "x86_lowbit": ("x86_lowbit", None),
    "compiled": ("x86", "compiled"),
    **{name: (name, None) for name in ("onnxruntime", "openvino", "xnnpack", "inductor_x86")},
    "ethos_u55": (f"{_EXAMPLES}/ethos_u55.yaml", None),
    "ethos_u65": (f"{_EXAMPLES}/ethos_u55.yaml", "ethos_u65"),
    "ethos_u85": (f"{_EXAMPLES}/ethos_u85.yaml", None),
    "tosa": ("tools/tosa/tosa.yaml", "tosa"),
    "shipped_tensorrt": ("tensorrt", None),
    "tensorrt_fp8": ("tensorrt_fp8", None),
}
_FINDINGS = 36


def description(page: str) -> tuple[BackendConfig, str | None]:
    """What is tried for a page, and on which engine."""
    if page in PYTORCH:
        return torch_spec(page), None
    backend, engine = OURS[page]
    return load_backend(str(ROOT / backend) if "." in backend else backend), engine


def tried(page: str, options: argparse.Namespace) -> Tried | None:
    """The run of one page, begun or gone on with; None where nothing has run and nothing is to."""
    folder = options.work / (f"pytorch_{page}" if page in PYTORCH else page)
    minutes = options.minutes if page in options.pages else 0.0
    if not minutes and not (folder / "outcomes.jsonl").exists():
        return None
    backend, engine = description(page)
    run = backquant.conform(
        backend,
        engine=engine,
        minutes=minutes,
        seed=options.seed,
        rounds=options.rounds,
        jobs=options.jobs,
        limit=options.limit,
        output=folder,
        resume=True,
    )
    return Tried(page, run, backend, folder)


def index(ours: Sequence[Tried], pytorch: Sequence[Tried], rounds: int) -> Iterator[str]:
    """The tables of all engines. What has not run keeps the row that it has."""
    readme = PAGES / "README.md"
    before = rows_before(readme.read_text(encoding="utf-8")) if readme.exists() else []
    yield "# Engines beside their descriptions"
    yield ""
    yield (
        "Written by `python -m tools.conformance_pages`; [conformance.md](../conformance.md) has the words. "
        "Trials: one claim with one use of its operator, called several times (accepted side), or all that "
        "lies one step beyond one claim (refused side). What has not run again keeps its row and its page."
    )
    yield from ("", "## Our descriptions", "")
    yield from outcomes(tuple(OURS), ours, rounds, before)
    yield from ("", "## Descriptions beside a compiler's answers", "")
    yield from compilers()
    yield from ("", "## PyTorch's backend configs, judged", "")
    yield (
        "What `torch.ao.quantization.backend_config` claims, tried on its kernels. Ours claim "
        "what is kept: `tests/unkept.py` lists where they differ. `executorch` and `qnnpack_pt2e` are "
        "tried on qnnpack's, the latter in the modules and functions that are exported to its operators; "
        "`tensorrt` has none in PyTorch, and is judged by TensorRT's rules. "
        "[Findings](findings.md), a script each."
    )
    yield ""
    yield from outcomes(PYTORCH, pytorch, rounds, before)


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
    imported = "from backquant.conformance.run import repeat\n"
    text = text.replace(imported, f"{imported}from tools.torch_specs import torch_spec\n")
    return text.replace(f"repeat({run.backend!r},", f"repeat(torch_spec({run.backend!r}),")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", default=(*PYTORCH, *OURS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "conformance")
    options = parser.parse_args()
    PAGES.mkdir(exist_ok=True)
    ours, pytorch = (
        [one for one in (tried(page, options) for page in pages) if one is not None]
        for pages in (OURS, PYTORCH)
    )
    page = ENGINES.read_text(encoding="utf-8")
    for one in (*ours, *pytorch):
        page = replaced(page, one.page, section(one.page, one.run))
        table = PAGES / "entries" / f"{one.page}.csv"
        table.write_text(entries(one.run), encoding="utf-8")
    ENGINES.write_text(page, encoding="utf-8")
    made = {"README.md": list(index(ours, pytorch, options.rounds))}  # reads the rows that stay
    if len(pytorch) == len(PYTORCH):
        made["findings.md"] = list(findings([one.run for one in pytorch]))
    for page, lines in made.items():
        (PAGES / page).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
