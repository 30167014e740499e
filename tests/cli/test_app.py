from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backquant
from backquant.cli.app import app

Run = Callable[..., Any]
COMMANDS = (
    "backends",
    "show",
    "diff",
    "check",
    "schema",
    "explain",
    "quantize",
    "inspect",
    "compare",
    "sensitivity",
    "search",
    "demo",
)


def test_the_commands_are_there() -> None:
    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(COMMANDS) <= names


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.status == 0 and "--json" in result.out


def test_no_command_is_help(run: Run) -> None:
    result = run()
    assert "quantize" in result.out + result.err


def test_unknown_commands_are_bad_usage(run: Run) -> None:
    result = run("quantise")
    assert result.status == 2 and result.out == "" and "No such command" in result.err


def test_version(run: Run, spawn: Run) -> None:
    assert run("--version").out == f"backquant {backquant.__version__}\n"
    process = spawn("--version")
    assert (process.status, process.out) == (0, f"backquant {backquant.__version__}\n")


def test_as_a_process(run: Run, spawn: Run) -> None:
    """Exit statuses and streams of a real process, in a pipe."""
    refused = spawn("check", "images.npz.yaml")
    assert refused.status == 2 and refused.out == ""
    differing = spawn("diff", "x86", "onednn", "--json")
    assert differing.status == 1 and differing.data["second"] == "onednn" and differing.err == ""
    done = spawn(
        "quantize", "zoo:make", "-d", "zoo:loader", "-o", "out.bq", "--json", "--slower", "keep"
    )
    assert done.status == 0 and done.data["artifact"] == "out.bq" and done.err == ""
    assert run("inspect", "out.bq").out.startswith("out.bq: x86 on ")


def test_a_reader_that_leaves_early_is_no_error(here: Path) -> None:
    source = str(Path(backquant.__file__).parents[1])
    command = f"{sys.executable} -m backquant show x86 --json | head -1"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.stdout == "{\n" and "Traceback" not in done.stderr


def test_help_is_cheap() -> None:
    """``--help`` and ``--version`` need neither torch nor pydantic."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from backquant.cli.app import app\n"
        "assert CliRunner().invoke(app, ['--version']).exit_code == 0\n"
        "assert not {'torch', 'pydantic'} & set(sys.modules), sorted(sys.modules)\n"
    )
    source = str(Path(backquant.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
