"""PyTorch's own tests of quantization, run on ``backquant.ao`` by prefix alone: how many pass.

    python tools/torch_own_tests.py PYTORCH/test/quantization --results DIR
    python tools/torch_own_tests.py PYTORCH/test/quantization --results DIR --select TestFuseFx --jobs 2
    python tools/torch_own_tests.py PYTORCH/test/quantization --results DIR --report docs/migrating.md

The files are read where they lie and copied to a temporary folder. ``torch_own/edits.py`` has all edits:
the prefix, and statements that use TorchScript. The installed torch's ``common_quantization.py``, on whose
helpers the tests stand, is copied and edited alike. Judged are the tests that, as they are written, pass
on the installed torch's own ``torch.ao``, and whose own body names neither ``torch.jit`` nor a name of
``torch.ao`` that begins with an underscore.

Each outcome is written as soon as it is known, to ``DIR/ours.jsonl`` and ``DIR/torch_ao.jsonl``. A test that
stands there is not run again: a run that was cut off goes on, and one may run in pieces. ``--again`` runs
anew what failed: the last outcome counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_TOOLS = Path(__file__).resolve().parent
_ROOT = _TOOLS.parent
_FILES = ("fx/test_quantize_fx.py", "core/test_backend_config.py", "core/test_workflow_module.py")
sys.path.insert(0, str(_TOOLS))

from torch_own.edits import uses_left_out, with_prefix, without_torchscript  # noqa: E402
from torch_own.summary import Outcomes, put_into, read, report  # noqa: E402


def run(sources: list[Path], results: Path, select: str, jobs: int, *, by_prefix: bool) -> None:
    """Add the outcomes of the selected tests that ``results`` lacks; ``by_prefix``: on backquant."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (place, _TOOLS, _ROOT / "src", _ROOT))),
            "TORCH_OWN_RESULTS": str(results.resolve()),
            "OMP_NUM_THREADS": "1",
        }
        if by_prefix:
            environment["TORCH_OWN_BASE"] = str(place / "edited_base.py")
            (place / "edited_base.py").write_text(_edited(_base().read_text()))
        for source in sources:
            text = source.read_text()
            (place / source.name).write_text(_edited(text) if by_prefix else text)
        options = ["-p", "torch_own.recorder", "-p", "no:cacheprovider", "-q", "--tb=short"]
        command = [sys.executable, "-W", "ignore", "-m", "pytest", *options]
        command += [str(place / source.name) for source in sources]
        command += ["--rootdir", folder, "-c", os.devnull, *(["-k", select] if select else [])]
        with tempfile.TemporaryFile("w+") as output:
            parts = [
                subprocess.Popen(
                    command,
                    cwd=place,
                    env={**environment, "TORCH_OWN_PART": f"{part} {jobs}"},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for part in range(jobs)
            ]
            codes = {part.wait() for part in parts}
            output.seek(0)
            if not codes <= {0, 1, 5}:  # passed, failed, none selected
                raise SystemExit(output.read()[-4000:])


def _base() -> Path:
    import torch.testing._internal as internal

    return Path(internal.__path__[0]) / "common_quantization.py"


def _edited(text: str) -> str:
    return with_prefix(without_torchscript(text))


def main() -> None:
    """Run what is missing on both, and print the counts; ``--report`` writes them into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="test/quantization of a checkout of PyTorch 2.6")
    parser.add_argument("--results", type=Path, required=True, help="the folder of the outcomes")
    parser.add_argument("--select", default="", help="as pytest's -k")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run anew what failed")
    parser.add_argument("--report", type=Path, help="the page to write the counts into")
    options = parser.parse_args()
    sources = [options.folder.resolve() / name for name in _FILES]
    options.results.mkdir(parents=True, exist_ok=True)
    ours, theirs = (options.results / name for name in ("ours.jsonl", "torch_ao.jsonl"))
    os.environ["TORCH_OWN_AGAIN"] = "failed" if options.again else ""
    run(sources, ours, options.select, options.jobs, by_prefix=True)
    if not read(ours).keys() <= read(theirs).keys():
        run(sources, theirs, options.select, options.jobs, by_prefix=False)
    left_out: dict[str, str] = {}
    for source in sources:
        left_out.update(uses_left_out(source.read_text()))
    outcomes = Outcomes(read(ours), read(theirs), left_out)
    print(report(outcomes))
    if options.report:
        put_into(options.report, outcomes)


if __name__ == "__main__":
    main()
