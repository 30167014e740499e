"""Every error that the rooms below raise has its text in a snapshot."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from backquant import errors

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "backquant"


def pattern(node: ast.expr) -> str | None:
    """A regular expression for a string, formatted or not; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else None for p in node.values)
        return "".join("(.|\n)+?" if part is None else re.escape(str(part)) for part in parts)
    return pattern(node.left) if isinstance(node, ast.BinOp) else None


def raised(path: Path) -> Iterator[tuple[int, str]]:
    """Line and pattern of each error of ours that a file makes with a text of its own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            found = pattern(node.args[0]) if node.func.id in errors.__all__ else None
            if found is not None:
                yield node.lineno, found


def without_a_file(room: str) -> list[str]:
    """The messages of a room that no file shows: where they are made, and their pattern."""
    files = TESTS.rglob(
        "messages/*.txt"
    )  # of any room: what api and cli are called with goes far down
    texts = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return [
        f"{path.relative_to(SOURCE)}: {found}".replace("\n", "\\n")
        for path in sorted((SOURCE / room).rglob("*.py"))
        for _, found in raised(path)
        if not re.search(found, texts)
    ]


@pytest.mark.parametrize(
    "room", ["api", "artifact", "cli", "report", "pipeline", "speed", "engines"]
)
def test_messages_of(room: str) -> None:
    assert without_a_file(room) == []


def test_patterns_match_what_they_stand_for() -> None:
    tree = ast.parse('f"the {kind} of {name!r}" + (x)', mode="eval").body
    found = pattern(tree)
    assert found is not None
    assert re.search(found, "the class of 'y', and more") and not re.search(found, "the class")
