"""Two thousand mutants; ``tools/fuzz_artifact.py`` by itself runs as many as it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tried(*options: str) -> str:
    """In a process of its own, whose forks try them, with the memory that is freed overwritten."""
    done = subprocess.run(
        [sys.executable, "tools/fuzz_artifact.py", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mutants_are_refused_or_compute() -> None:
    told = tried("--count", "2000", "--seed", "3")
    assert "2000 mutants" in told
    for outcome in ("refused", "equal", "other numbers"):
        assert outcome in told


def test_other_spellings_of_names_change_nothing() -> None:
    told = tried("--names", "--count", "2000", "--seed", "5")
    assert "2000 mutants" in told
    for outcome in ("refused", "equal", "error of the call"):
        assert outcome in told
