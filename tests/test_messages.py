"""Every error that the rooms below raise has its text in a snapshot."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapshots
from backquant import errors

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "backquant"


Pieces = tuple[str, ...]


def pieces(node: ast.expr) -> Pieces | None:
    """The literal parts of a string, formatted or not, in their order; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    if isinstance(node, ast.JoinedStr):
        return tuple(str(part.value) for part in node.values if isinstance(part, ast.Constant))
    return pieces(node.left) if isinstance(node, ast.BinOp) else None


def shows(text: str, found: Pieces) -> bool:
    """Whether the parts stand in ``text`` one after another."""
    place = 0
    for piece in found:
        place = text.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


def raised(path: Path) -> Iterator[tuple[int, Pieces]]:
    """Line and parts of each error of ours that a file makes with a text of its own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            found = pieces(node.args[0]) if node.func.id in errors.__all__ else None
            if found is not None:
                yield node.lineno, found


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every text of every room: what api and cli are called with goes far down."""
    files = sorted(TESTS.rglob("messages/*.txt"))
    return [text for path in files for text in snapshots.sections(path).values()]


@pytest.mark.parametrize(
    "room", ["api", "artifact", "cli", "report", "pipeline", "speed", "engines"]
)
def test_messages_of(room: str, texts: list[str]) -> None:
    """Errors that no file shows: where they are raised, and their parts."""
    assert [
        f"{path.relative_to(SOURCE)}:{line}: {found}"
        for path in sorted((SOURCE / room).rglob("*.py"))
        for line, found in raised(path)
        if not any(shows(text, found) for text in texts)
    ] == []


def test_parts_stand_in_their_order() -> None:
    tree = ast.parse('f"the {kind} of {name!r}" + (x)', mode="eval").body
    found = pieces(tree)
    assert found == ("the ", " of ")
    assert shows("the class of 'y', and more", found) and not shows("of the class", found)
