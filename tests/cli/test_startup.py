"""Which commands start without torch, and without what else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import backquant
from backquant import cli

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


def test_loading_pytorch_is_said_once_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    finder = cli._SaysLoading()
    for name in ("typing", "torch", "torch"):
        assert finder.find_spec(name) is None
    assert capsys.readouterr().err == "loading PyTorch …\n"


def test_in_a_pipe_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    cli._SaysLoading().find_spec("torch")
    assert capsys.readouterr().err == ""


def test_help_has_no_colours_of_a_library() -> None:
    """rich takes longer to import than the rest of ``--help``."""
    code = "import sys, backquant.cli.app; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
