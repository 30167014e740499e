"""A few draws for each callable; more: ``python tools/hostile_calls.py --draws 40``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "hostile_calls.py"


def run(*options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(TOOL), *options], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_no_callable_of_a_file_ends_the_process() -> None:
    status, said = run("--draws", "1", "--seed", "3")
    assert status == 0, said
    assert int(said.split("'result': ")[1].split(",")[0].rstrip("}\n")) > 500


def test_operators_of_python_end() -> None:
    paths = ["builtins.range", "builtins.sum", "operator.mul", "operator.mod", "math.prod"]
    status, said = run("--only", *paths, "--draws", "60")
    assert status == 0, said
