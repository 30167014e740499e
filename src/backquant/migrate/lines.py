"""One statement replaced by several, or by none, in the lines of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from backquant.migrate.changes import Changes
from backquant.migrate.local_names import ImportStatement, Names


def replace_statement(
    names: Names,
    changes: Changes,
    statement: ImportStatement,
    new: Sequence[cst.BaseSmallStatement],
    kept: ImportStatement | None,
) -> None:
    """Put ``new``, and ``kept`` of the statement itself, in its place.

    A statement with a line of its own gets a line per statement; one that shares its line stays
    there. A comment above goes with what it was written for, or on to the next line.
    """
    line = names.parents[statement]
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        if not new and kept is None:
            _hand_on_comments(names, changes, line)
        changes.edit(line, lambda updated: _lines(updated, new, kept))
    else:
        parts = [*new, kept] if kept is not None else list(new)
        changes.edit(statement, lambda updated: _small(updated, parts))


def _small(updated: Any, parts: Sequence[cst.BaseSmallStatement]) -> Any:
    """Several statements on one line, with the semicolon of the one they replace."""
    if not parts:
        return cst.RemoveFromParent()
    *front, last = parts
    semicolon = cst.Semicolon(whitespace_after=cst.SimpleWhitespace(" "))
    return cst.FlattenSentinel(
        [
            *(part.with_changes(semicolon=semicolon) for part in front),
            last.with_changes(semicolon=updated.semicolon),
        ]
    )


def _lines(
    line: cst.SimpleStatementLine,
    new: Sequence[cst.BaseSmallStatement],
    kept: cst.BaseSmallStatement | None,
) -> Any:
    """One line per statement. A comment above stays with what it was written for."""
    if kept is None and not new:
        return cst.RemoveFromParent()
    if kept is None:
        first, *rest = new
        return cst.FlattenSentinel([line.with_changes(body=[first]), *map(_line, rest)])
    if not new:
        return line.with_changes(body=[kept])
    kept_line = line.with_changes(body=[kept])
    if any(empty.comment for empty in line.leading_lines):
        return cst.FlattenSentinel([kept_line, *map(_line, new)])
    first, *rest = new
    above = _line(first).with_changes(leading_lines=line.leading_lines)
    return cst.FlattenSentinel([above, *map(_line, rest), kept_line.with_changes(leading_lines=[])])


def _line(statement: cst.BaseSmallStatement) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([statement])


def _hand_on_comments(names: Names, changes: Changes, line: cst.SimpleStatementLine) -> None:
    """Give the comments of a line that goes to the next one, or to the end of the block."""
    comments = [empty for empty in line.leading_lines if empty.comment]
    trailing = line.trailing_whitespace.comment
    if trailing is not None:
        comments.append(cst.EmptyLine(comment=trailing))
    if not comments:
        return
    block: Any = names.parents[line]
    body = list(block.body)
    index = next(i for i, found in enumerate(body) if found is line)
    if index + 1 < len(body):
        changes.edit_first(
            body[index + 1],
            lambda updated: updated.with_changes(leading_lines=[*comments, *updated.leading_lines]),
        )
    else:
        changes.edit(
            block, lambda updated: updated.with_changes(footer=[*comments, *updated.footer])
        )
