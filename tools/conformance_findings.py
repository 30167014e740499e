"""Run each script of docs/conformance/findings.md, and write what it prints behind it.

    python -m tools.conformance_findings            # all of them, each in a process of its own
    python -m tools.conformance_findings --check    # nothing is written; exit status 1 where a result differs

What a script prints is the verdict that it repeats, or ``nothing`` where the case is not met any more.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

import backquant

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "conformance" / "findings.md"
MOST_LINES = 30
_BLOCK = re.compile(
    r"```python\n(?P<script>.*?)```(?:\n\nPrinted \((?P<with>[^)]*)\):\n\n```text\n(?P<printed>.*?)```)?",
    re.DOTALL,
)


def printed_by(script: str, seconds: float = 300.0) -> str:
    """What ``script`` prints; the last line of its error, if it ends with one."""
    paths = [str(ROOT / "src"), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:g} s\n"
    if run.returncode:
        said = run.stderr.strip().splitlines() or ["nothing"]
        return f"exit status {run.returncode}: {said[-1]}\n"
    return run.stdout or "nothing\n"


def versions() -> str:
    """What the scripts ran with, and when."""
    day = datetime.now(timezone.utc).date().isoformat()
    return f"backquant {backquant.__version__}, torch {torch.__version__}, {day}"


def with_results(page: str, stamp: str) -> tuple[str, list[str]]:
    """``page`` with what each script prints behind it, and the titles whose results differ from before.

    >>> made, _ = with_results("## One\\n\\n```python\\nprint(1 + 1)\\n```\\n", "today")
    One: 2
    >>> made.splitlines()[-3:]
    ['```text', '2', '```']
    >>> with_results(made, "tomorrow")[1]
    One: 2
    []
    """
    changed: list[str] = []

    def ran(found: re.Match[str]) -> str:
        script = found["script"]
        title = page[: found.start()].rpartition("\n## ")[2].partition("\n")[0].removeprefix("## ")
        if script.count("\n") > MOST_LINES:
            raise ValueError(f"{title}: {script.count(chr(10))} lines; {MOST_LINES} at most")
        printed = printed_by(script)
        print(f"{title}: {printed.strip()}", flush=True)
        if printed != found["printed"]:
            changed.append(title)
        return f"```python\n{script}```\n\nPrinted ({stamp}):\n\n```text\n{printed}```"

    return _BLOCK.sub(ran, page), changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    made, changed = with_results(PAGE.read_text(encoding="utf-8"), versions())
    if options.check:
        sys.exit(f"other results: {'; '.join(changed)}" if changed else 0)
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
