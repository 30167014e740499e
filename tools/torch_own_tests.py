"""PyTorch's own tests of FX quantization, run on backquant: how many pass.

    python tools/torch_own_tests.py PYTORCH/test/quantization
    python tools/torch_own_tests.py PYTORCH/test/quantization -k TestFuseFx --json results.jsonl

The files are read where they lie and edited in a temporary folder (``torch_own/rewrite.py`` lists every
edit); the classes that they build on are those of the installed torch. A model that ``convert_fx`` gave is
judged

- by ``outputs``: what it computes, and what the test says of everything else (prepared, fused and reference
  graphs, configs, state); its own graph is not looked at;
- by ``graph``: also by the operators in its graph, in the words of ``torch_own/graphs.py``.

Failures that are meant have their reason in ``torch_own/excluded.py``, and count as failures. Tests that do
not count are those of the same file, with a reason each, and those that PyTorch itself skips on this machine
(no CUDA).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TOOLS = Path(__file__).resolve().parent
_ROOT = _TOOLS.parent
_FILES = ("fx/test_quantize_fx.py", "core/test_backend_config.py")


def run(folder: Path, wanted: str) -> list[dict[str, Any]]:
    """The results of the tests of ``folder``, one dict per test."""
    sys.path.insert(0, str(_TOOLS))
    from torch_own.rewrite import write_adapted

    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        tests = write_adapted([folder / name for name in _FILES], place)
        results = place / "results.jsonl"
        paths = (place, _TOOLS, _ROOT / "src", _ROOT)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TORCH_OWN_RESULTS": str(results),
        }
        options = ["-p", "torch_own.recorder", "-p", "no:cacheprovider", "-q", "--tb=short"]
        command = [sys.executable, "-W", "ignore", "-m", "pytest", *options, *map(str, tests)]
        command += ["--rootdir", made, "-c", os.devnull, *(["-k", wanted] if wanted else [])]
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        if not results.exists():
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        return [json.loads(line) for line in results.read_text().splitlines()]


def summary(results: list[dict[str, Any]]) -> str:
    """The counts, then each test that failed or is excluded, with the reason.

    >>> print(summary([{"test": "T.test_a", "outcome": "passed", "why": "", "graph": ["add: 0 times"]}]))
    by outputs: 1 of 1 pass (100.0 %)
    by graph: 0 of 1 pass (0.0 %)
    passed by outputs, not by graph: 1
      T.test_a: add: 0 times
    """
    sys.path.insert(0, str(_TOOLS))
    from torch_own.excluded import ON_PURPOSE

    judged = [result for result in results if result["outcome"] in ("passed", "failed")]
    passed = [result for result in judged if result["outcome"] == "passed"]
    other = [{**result, "why": result["graph"][0]} for result in passed if result["graph"]]
    counts = {"outputs": len(passed), "graph": len(passed) - len(other)}
    lines = [
        f"by {judge}: {count} of {len(judged)} pass ({100 * count / max(1, len(judged)):.1f} %)"
        for judge, count in counts.items()
    ]
    failed = [result for result in judged if result["outcome"] == "failed"]
    meant = [r for r in (*failed, *other) if r["test"] in ON_PURPOSE]
    groups = {
        "failed": [result for result in failed if result not in meant],
        "passed by outputs, not by graph": [result for result in other if result not in meant],
        "differs on purpose": [{**result, "why": ON_PURPOSE[result["test"]]} for result in meant],
    }
    for outcome in ("excluded", "skipped"):
        groups[outcome] = [result for result in results if result["outcome"] == outcome]
    for title, chosen in groups.items():
        lines += [f"{title}: {len(chosen)}"] if chosen else []
        lines += [f"  {result['test']}: {_first_line(result['why'])}" for result in chosen]
    return "\n".join(lines)


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:160]


def main() -> None:
    """Run, print, and write the results as JSON lines where ``--json`` says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="test/quantization of a checkout of PyTorch 2.6")
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("--json", type=Path, help="also write the results here")
    given = parser.parse_args()
    results = run(given.folder.resolve(), given.k)
    print(summary(results))
    if given.json:
        given.json.write_text("".join(json.dumps(result) + "\n" for result in results))


if __name__ == "__main__":
    main()
