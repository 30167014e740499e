"""Import statements rewritten: parts of them become others, their comments and layout stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from backquant.migrate.changes import Changes, Spec
from backquant.migrate.local_names import ImportStatement, Names

__all__ = ["rewrite_imports"]

_WIDTH = 88


def rewrite_imports(names: Names, changes: Changes) -> None:
    """Turn what is asked of imports into edits of their lines.

    ``import x`` is written once per block, and not in a block whose module has it further up.
    """
    seen = _Seen(names)
    for statement in sorted(_statements(names), key=names.line):
        kept, new = _parts(statement, changes)
        wanted = [s for s in changes.added.get(statement, ()) if not _has(statement, s)]
        plain = [s for s in (*_plain(statement, changes), *wanted) if s.name == ""]
        named = [s for s in wanted if s.name]
        lines: list[cst.BaseSmallStatement] = [
            _import(s) for s in dict.fromkeys(plain) if seen.first(statement, s)
        ]
        lines += _with_names(new, named)
        seen.keep(statement, kept)
        if kept is not statement or lines:
            _replace(names, changes, statement, lines, kept)


class _Seen:
    """Which ``import x`` a block has already."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.blocks: dict[int, set[Spec]] = {}

    def _block(self, statement: cst.CSTNode) -> cst.CSTNode:
        parent = self.names.parents[statement]
        while isinstance(parent, cst.SimpleStatementLine):
            parent = self.names.parents[parent]
        return parent

    def first(self, statement: ImportStatement, spec: Spec) -> bool:
        """Whether ``spec`` is new here; from now on it is not."""
        block = self.blocks.setdefault(id(self._block(statement)), set())
        module = self.blocks.get(id(self.names.wrapper.module), set())
        new = spec not in block and spec not in module
        block.add(spec)
        return new

    def keep(self, statement: ImportStatement, kept: ImportStatement | None) -> None:
        """Note what a statement goes on importing."""
        if isinstance(kept, cst.Import):
            for alias in kept.names:
                name = alias.evaluated_name
                local = alias.evaluated_alias or name
                self.first(statement, Spec(name, "", local))


def _statements(names: Names) -> list[ImportStatement]:
    """All import statements, since unchanged ones count for what a block has."""
    found = m.findall(names.wrapper.module, m.Import() | m.ImportFrom())
    return [node for node in found if isinstance(node, (cst.Import, cst.ImportFrom))]


def _has(statement: ImportStatement, spec: Spec) -> bool:
    """Whether the statement imports ``spec`` as it is."""
    if isinstance(statement, cst.ImportFrom) or spec.name:
        return False
    return any(
        alias.evaluated_name == spec.module
        and (alias.evaluated_alias or alias.evaluated_name) == spec.local
        for alias in statement.names
    )


def _plain(statement: ImportStatement, changes: Changes) -> list[Spec]:
    """What the statement's own names become, where that is ``import x``."""
    if isinstance(statement.names, cst.ImportStar):
        return []
    specs = (changes.aliases.get(alias) for alias in statement.names)
    return [spec for spec in specs if spec is not None and spec.name == ""]


def _parts(
    statement: ImportStatement, changes: Changes
) -> tuple[ImportStatement | None, list[cst.ImportFrom]]:
    """What stays of a statement, and the ``from … import`` that its names become."""
    if isinstance(statement.names, cst.ImportStar):
        assert isinstance(statement, cst.ImportFrom)
        if statement not in changes.stars:
            return statement, []
        return None, _from_specs(changes.stars[statement])
    staying = [alias for alias in statement.names if alias not in changes.aliases]
    if len(staying) == len(statement.names):
        return statement, []
    kept = statement.with_changes(names=_ended(staying, statement)) if staying else None
    groups: dict[str, list[cst.ImportAlias]] = {}
    for alias in statement.names:
        spec = changes.aliases.get(alias)
        if spec is not None and spec.name:
            groups.setdefault(spec.module, []).append(_renamed(alias, spec))
    new = [
        _from(statement, module, _ended(aliases, statement)) for module, aliases in groups.items()
    ]
    return kept, new


def _renamed(alias: cst.ImportAlias, spec: Spec) -> cst.ImportAlias:
    """The alias under its new name; the local name is said where it differs."""
    asname = None
    if spec.local != spec.name:
        asname = alias.asname or cst.AsName(cst.Name(spec.local))
        if spec.local != (alias.evaluated_alias or alias.evaluated_name):
            asname = cst.AsName(cst.Name(spec.local))
    return alias.with_changes(name=cst.Name(spec.name), asname=asname)


def _ended(aliases: Sequence[cst.ImportAlias], statement: Any) -> list[cst.ImportAlias]:
    """The aliases, the last one with the comma that the statement's last one has."""
    *front, last = aliases
    comma = statement.names[-1].comma
    if last is not statement.names[-1] and not _has_comment(last.comma):
        last = last.with_changes(comma=comma)
    if isinstance(statement, cst.Import) and _has_comment(last.comma):
        last = last.with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return [*front, last]


def _has_comment(comma: Any) -> bool:
    return isinstance(comma, cst.Comma) and bool(m.findall(comma, m.Comment()))


def _from(
    statement: ImportStatement, module: str, aliases: Sequence[cst.ImportAlias]
) -> cst.ImportFrom:
    """``from module import …`` in the layout of the statement it comes from."""
    name = cst.parse_expression(module)
    assert isinstance(name, (cst.Attribute, cst.Name))
    if isinstance(statement, cst.ImportFrom):
        return statement.with_changes(
            module=name, names=list(aliases), semicolon=cst.MaybeSentinel.DEFAULT
        )
    return cst.ImportFrom(module=name, names=list(aliases))


def _from_specs(specs: Iterable[Spec]) -> list[cst.ImportFrom]:
    groups: dict[str, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(spec.module, []).append(spec)
    found = []
    for module, group in groups.items():
        line = cst.parse_statement(_text(module, group))
        assert isinstance(line, cst.SimpleStatementLine)
        found += [part for part in line.body if isinstance(part, cst.ImportFrom)]
    return found


def _text(module: str, specs: Sequence[Spec]) -> str:
    names = [s.name if s.name == s.local else f"{s.name} as {s.local}" for s in specs]
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _WIDTH:
        return line
    inside = "".join(f"    {name},\n" for name in names)
    return f"from {module} import (\n{inside})"


def _import(spec: Spec) -> cst.Import:
    name = cst.parse_expression(spec.module)
    assert isinstance(name, (cst.Attribute, cst.Name))
    asname = None if spec.local == spec.module else cst.AsName(cst.Name(spec.local))
    return cst.Import([cst.ImportAlias(name, asname)])


def _with_names(statements: list[cst.ImportFrom], specs: Sequence[Spec]) -> list[cst.ImportFrom]:
    """Add names to the statements: to one of their module where there is one."""
    result = list(statements)
    for spec in specs:
        for index, statement in enumerate(result):
            longer = _longer(statement, spec)
            if longer is not None:
                result[index] = longer
                break
        else:
            result += _from_specs([spec])
    return result


def _longer(statement: cst.ImportFrom, spec: Spec) -> cst.ImportFrom | None:
    """The statement with one more name, where that keeps its layout."""
    blank = cst.Module([])
    if blank.code_for_node(statement.module or cst.Name("x")) != spec.module:
        return None
    if isinstance(statement.names, cst.ImportStar):
        return None
    *front, last = statement.names
    if last.evaluated_name == spec.name or any(a.evaluated_name == spec.name for a in front):
        return statement
    if _has_comment(last.comma):
        return None
    between = front[-1].comma if front and not _has_comment(front[-1].comma) else _comma()
    extra = cst.ImportAlias(cst.Name(spec.name), comma=last.comma)
    longer = statement.with_changes(names=[*front, last.with_changes(comma=between), extra])
    code = blank.code_for_node(longer)
    if max(map(len, code.splitlines())) <= _WIDTH:
        return longer
    if statement.lpar is not None:
        return None
    names = [_spec_of(spec.module, alias) for alias in statement.names]
    return _from_specs([*names, spec])[0]


def _spec_of(module: str, alias: cst.ImportAlias) -> Spec:
    name = alias.evaluated_name
    return Spec(module, name, alias.evaluated_alias or name)


def _comma() -> cst.Comma:
    return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


# edits of lines


def _replace(
    names: Names,
    changes: Changes,
    statement: ImportStatement,
    new: Sequence[cst.BaseSmallStatement],
    kept: ImportStatement | None,
) -> None:
    """Put ``new`` and what stays in the statement's place."""
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
