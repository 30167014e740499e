"""PyTorch's own tests of quantization, run on ``backquant.ao`` by prefix alone: how many pass.

    python tools/torch_own_tests.py PYTORCH/test/quantization
    python tools/torch_own_tests.py PYTORCH/test/quantization -k TestFuseFx --json results.jsonl

The files are read where they lie and copied to a temporary folder. ``torch_own/edits.py`` has all edits:
the prefix, and statements that use TorchScript. The installed torch's ``common_quantization.py``, on whose
helpers the tests stand, is copied and edited alike. Judged are the tests that, as they are written, pass
on the installed torch's own ``torch.ao``, and whose own body names neither ``torch.jit`` nor a name of
``torch.ao`` that begins with an underscore.
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
_FILES = ("fx/test_quantize_fx.py", "core/test_backend_config.py", "core/test_workflow_module.py")
sys.path.insert(0, str(_TOOLS))

from torch_own.edits import uses_left_out, with_prefix, without_torchscript  # noqa: E402

Results = list[dict[str, Any]]


def run(sources: list[Path], wanted: str, *, by_prefix: bool) -> Results:
    """The results of the tests in ``sources``, one dict per test; ``by_prefix``: on backquant."""
    import torch.testing._internal as internal

    base = Path(internal.__path__[0]) / "common_quantization.py"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        results = place / "results.jsonl"
        paths = (place, _TOOLS, _ROOT / "src", _ROOT)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TORCH_OWN_RESULTS": str(results),
        }
        if by_prefix:
            environment["TORCH_OWN_BASE"] = str(place / "edited_base.py")
            (place / "edited_base.py").write_text(_edited(base.read_text()))
        for source in sources:
            text = source.read_text()
            (place / source.name).write_text(_edited(text) if by_prefix else text)
        options = ["-p", "torch_own.recorder", "-p", "no:cacheprovider", "-q", "--tb=short"]
        tests = [str(place / source.name) for source in sources]
        command = [sys.executable, "-W", "ignore", "-m", "pytest", *options, *tests]
        command += ["--rootdir", folder, "-c", os.devnull, *(["-k", wanted] if wanted else [])]
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        if not results.exists():
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        return read(results)


def _edited(text: str) -> str:
    return with_prefix(without_torchscript(text))


def read(path: Path) -> Results:
    """The results in a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(results: Results, baseline: Results, left_out: dict[str, str]) -> str:
    """The counts, each judged test that failed, and what is not judged.

    >>> passed = [{"test": "T.test_a", "outcome": "passed", "why": ""}]
    >>> print(summary([{"test": "T.test_a", "outcome": "failed", "why": "no scale"}], passed, {}))
    by prefix alone: 0 of 1 pass (0.0 %)
    failed: 1
      T.test_a: no scale
    """
    passing = {result["test"] for result in baseline if result["outcome"] == "passed"}
    judged = [r for r in results if r["test"] in passing and r["test"] not in left_out]
    failed = [result for result in judged if result["outcome"] != "passed"]
    passed = len(judged) - len(failed)
    groups = {
        "failed": [(r["test"], _first_line(r["why"])) for r in failed],
        "not judged": [
            (r["test"], left_out.get(r["test"], "torch.ao itself does not pass it here"))
            for r in results
            if r not in judged
        ],
    }
    share = 100 * passed / max(1, len(judged))
    lines = [f"by prefix alone: {passed} of {len(judged)} pass ({share:.1f} %)"]
    for title, tests in groups.items():
        lines += [f"{title}: {len(tests)}"] if tests else []
        lines += [f"  {test}: {why}" for test, why in tests]
    return "\n".join(lines)


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:200]


def main() -> None:
    """Run on both, print, and write the results as JSON lines where ``--json`` says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="test/quantization of a checkout of PyTorch 2.6")
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument(
        "--baseline", type=Path, help="torch.ao's results: read from here, or written if absent"
    )
    options = parser.parse_args()
    sources = [options.folder.resolve() / name for name in _FILES]
    if options.baseline and options.baseline.exists():
        baseline = read(options.baseline)
    else:
        baseline = run(sources, options.k, by_prefix=False)
        if options.baseline:
            _write(options.baseline, baseline)
    results = run(sources, options.k, by_prefix=True)
    left_out: dict[str, str] = {}
    for source in sources:
        left_out.update(uses_left_out(source.read_text()))
    print(summary(results, baseline, left_out))
    if options.json:
        _write(options.json, results)


def _write(path: Path, results: Results) -> None:
    path.write_text("".join(json.dumps(result) + "\n" for result in results))


if __name__ == "__main__":
    main()
