"""Texts that are not ours, in messages and on terminals: read back by what would read them."""

from __future__ import annotations

import ast
import io
import shlex
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from backquant.errors import (
    BackquantError,
    UsageError,
    command,
    literal,
    printable,
    quoted,
)
from backquant.pages.console import SafeConsole
from backquant.report.model import Report, Row

HOSTILE = st.sampled_from(
    [
        "\x1b[2J\x1b]0;title\x07",
        "a\rb",
        "\u202egpj.exe",
        "\u2066x\u2069",
        "\ud800",
        "\x00",
        "\x9b31m",
        "'); import os  # ",
        '"); import os  # ',
        "\\",
        "\n  fix    rm -rf /",
        "$(reboot)",
        "`reboot`",
        "\u2028",
        "{0}%s%n",
        "[bold]x[/bold]",
        "\U000e0041",
    ]
)
TEXTS = st.lists(HOSTILE | st.text(max_size=8), max_size=4).map("".join)
COMMANDS = {"Cc", "Cs", "Zl", "Zp"}  # what moves a cursor or is no character
DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def moves(text: str) -> bool:
    return any(
        (unicodedata.category(mark) in COMMANDS and mark not in "\n\t")
        or unicodedata.bidirectional(mark) in DIRECTIONS
        for mark in text
    )


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_what_is_shown_moves_no_cursor_and_changes_no_direction(text: str) -> None:
    assert not moves(printable(text))
    assert printable(printable(text)) == printable(text)
    error = BackquantError(text, where=text, fix=text)
    assert not moves(str(error)) and not any(moves(str(part)) for part in error.args)


def test_plain_text_of_any_language_is_shown_as_it_is() -> None:
    text = "µ-scale, größer, 量化, مرحبا, e\u0301, 👍\n\tx"
    assert printable(text) == text


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_a_literal_is_read_back_by_python(text: str) -> None:
    written = literal(text)
    assert written.isascii() and written.isprintable()
    assert ast.literal_eval(written) == text
    called = ast.parse(f"mapping.set_module_name({written}, None)", mode="eval").body
    assert isinstance(called, ast.Call) and len(called.args) == 2


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(0, 100_000))
def test_a_quoted_name_is_short_and_stays_in_its_line(text: str, times: int) -> None:
    name = quoted(text * times if len(text) * times < 1_000_000 else text)
    assert name.isascii() and name.isprintable() and len(name) < 900


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS.filter(lambda text: "\x00" not in text), min_size=1))
def test_a_command_is_read_back_by_a_shell(words: list[str]) -> None:
    assert shlex.split(command(*words)) == words


@settings(max_examples=100, deadline=None)
@given(TEXTS)
@example("[/bold]")
@example("[red]:smiley:")
def test_a_terminal_gets_no_command_of_a_name(text: str) -> None:
    table = Table(text)
    table.add_row(Text(text))
    for shown in (Text(text), table):
        SafeConsole(file=(stream := io.StringIO()), highlight=False).print(shown)
        assert not moves(stream.getvalue())


@settings(max_examples=30, deadline=None)
@given(TEXTS)
def test_a_report_shows_hostile_names(text: str) -> None:
    report = Report(text, rows=(Row(text, text, text, "float"),), notes=(text,), model=text)
    assert not moves(report.render())


def test_styles_of_ours_reach_a_terminal() -> None:
    console = SafeConsole(file=(stream := io.StringIO()), force_terminal=True)
    console.print(Text("\x1b[2Jname", style="bold"))
    assert "\x1b[1m\\x1b[2Jname\x1b[0m" in stream.getvalue()


@pytest.mark.parametrize("kind", [BackquantError, UsageError])
def test_parts_of_an_error_are_printable(kind: type[BackquantError]) -> None:
    error = kind("a\x1bb", where="\u202ec", fix="d\re")
    assert (error.what, error.where, error.fix) == ("a\\x1bb", "\\u202ec", "d\\re")
