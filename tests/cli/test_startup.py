"""Which commands start without torch, and without what else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import backquant

COSTLY = ("torch", "numpy", "yaml", "jinja2", "safetensors", "sklearn")
PROBE = """
import sys
sys.argv = ["backquant", *{arguments!r}]
from backquant.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {costly!r} if name in sys.modules], file=sys.stderr)
"""


def costly_modules(here: Path, *arguments: str) -> str:
    code = PROBE.format(arguments=list(arguments), costly=COSTLY)
    source = str(Path(backquant.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "XDG_CACHE_HOME": str(here / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["schema"], ["show", "--help"]])
def test_commands_that_need_no_torch(here: Path, arguments: list[str]) -> None:
    assert costly_modules(here, *arguments) == "[]"


def test_listing_backends_asks_torch_once(here: Path) -> None:
    assert "torch" in costly_modules(here, "backends")
    assert costly_modules(here, "backends") == "[]"
    assert costly_modules(here, "backends", "--json") == "[]"
