from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from backquant.cli import console
from backquant.errors import BackquantError, CoverageError, UsageError


def wide_table() -> Table:
    table = Table("a", "b")
    table.add_row("x" * 60, "y" * 60)
    return table


def test_tables_in_pipes_are_wide_and_not_folded(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console.emit(wide_table(), as_json=False, data=None)
    assert "x" * 60 in capsys.readouterr().out


def test_columns_may_be_asked_for(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    console.emit(wide_table(), as_json=False, data=None)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_lines_of_text_are_never_broken_in_pipes(capsys: Any) -> None:
    console.emit(Group(Text("z " * 300), wide_table()), as_json=False, data=None)
    assert capsys.readouterr().out.splitlines()[0] == ("z " * 300).rstrip()


def test_a_terminal_is_printed_to_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=40)
    console.print_parts(terminal, Group(Text("w " * 40)))
    assert len(stream.getvalue().splitlines()) > 1


def test_json_is_valid_or_an_error(capsys: Any) -> None:
    console.emit("", as_json=True, data={"a": [1, None, "ü"]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None, "ü"]}
    with pytest.raises(ValueError, match="JSON"):
        console.emit("", as_json=True, data=float("nan"))


def test_notes_go_to_standard_error(capsys: Any) -> None:
    console.note("a [note]")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "a [note]\n")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CoverageError("too little"), console.NO),
        (UsageError("odd", where="here [x]", fix="so"), console.USAGE),
        (BackquantError("else"), console.USAGE),
    ],
)
def test_errors_of_ours_become_a_message_and_a_status(
    error: BackquantError, status: int, capsys: Any
) -> None:
    with pytest.raises(typer.Exit) as caught, console.guarded(as_json=True):
        raise error
    out, err = capsys.readouterr()
    assert caught.value.exit_code == status
    assert err == f"error: {error}\n"
    parts = {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "fix": error.fix,
    }
    assert json.loads(out) == {"error": parts}


def test_a_full_disk_is_told_in_one_line(capsys: Any) -> None:
    with pytest.raises(typer.Exit) as caught, console.guarded():
        raise OSError(errno.ENOSPC, "No space left on device", "page.html")
    assert caught.value.exit_code == console.USAGE
    assert "page.html: No space left on device" in capsys.readouterr().err


def test_other_errors_are_defects_and_pass_through() -> None:
    with pytest.raises(ZeroDivisionError), console.guarded():
        raise ZeroDivisionError


def test_stop() -> None:
    call: Callable[[int], object] = console.stop
    with pytest.raises(typer.Exit) as caught:
        call(1)
    assert caught.value.exit_code == 1


WRITERS = """
import ctypes, os
from backquant.cli import console
with console.only_answers():
    os.write(1, b"from C++\\n")
    ctypes.CDLL(None).puts(b"from C, in a buffer")
    print("from a metric")
print("the answer")
"""


def test_what_others_write_to_standard_output_is_no_answer() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WRITERS], capture_output=True, text=True, check=True
    )
    assert run.stdout == "the answer\n"
    assert sorted(run.stderr.splitlines()) == ["from C++", "from C, in a buffer", "from a metric"]
