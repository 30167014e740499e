"""Import statements rewritten: parts of them become others, their comments and layout stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from backquant.migrate.changes import Changes, Spec
from backquant.migrate.lines import replace_statement
from backquant.migrate.local_names import ImportStatement, Names

_WIDTH = 88


def rewrite_imports(names: Names, changes: Changes) -> None:
    """Turn what is asked of imports into edits of their lines.

    ``import x`` is written once per block, and not in a block whose module has it further up.
    """
    if not (changes.aliases or changes.stars or changes.added):
        return
    seen = _Seen(names)
    for statement in sorted(_statements(names), key=names.line):
        kept, new = _parts(statement, changes)
        wanted = [s for s in changes.added.get(statement, ()) if not _has(statement, s)]
        plain = [s for s in (*wanted, *_plain(statement, changes)) if s.name == ""]
        named = [s for s in wanted if s.name]
        lines: list[cst.BaseSmallStatement] = [
            _import(s) for s in dict.fromkeys(plain) if seen.first(statement, s)
        ]
        lines += _with_names(new, named)
        seen.keep(statement, kept)
        if kept is not statement or lines:
            replace_statement(names, changes, statement, lines, kept)


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
    return [node for node in names.parents if isinstance(node, (cst.Import, cst.ImportFrom))]


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
    specs = [changes.aliases.get(alias) for alias in statement.names]
    staying = [i for i, spec in enumerate(specs) if spec is None]
    if len(staying) == len(specs):
        return statement, []
    kept = _selected(statement, statement.names, staying) if staying else None
    renamed = [
        alias if spec is None or not spec.name else _renamed(alias, spec)
        for alias, spec in zip(statement.names, specs, strict=True)
    ]
    groups: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        if spec is not None and spec.name:
            groups.setdefault(spec.module, []).append(index)
    return kept, [_from(statement, module, renamed, chosen) for module, chosen in groups.items()]


def _renamed(alias: cst.ImportAlias, spec: Spec) -> cst.ImportAlias:
    """The alias under its new name; the local name is said where it differs."""
    asname = None
    if spec.local != spec.name:
        asname = alias.asname or cst.AsName(cst.Name(spec.local))
        if spec.local != (alias.evaluated_alias or alias.evaluated_name):
            asname = cst.AsName(cst.Name(spec.local))
    return alias.with_changes(name=cst.Name(spec.name), asname=asname)


def _selected(statement: Any, aliases: Sequence[cst.ImportAlias], chosen: Sequence[int]) -> Any:
    """The statement with some of its names only; ``aliases`` are all of them, under new names.

    A comment behind a name stays with it, and so do comments on lines of their own above it.
    """
    names = [aliases[i] for i in chosen]
    last = statement.names[-1].comma
    above = [_above(alias.comma) for alias in statement.names]
    for position, index in enumerate(chosen):
        comma = names[position].comma
        if index == len(aliases) - 1:
            continue
        if position == len(chosen) - 1:
            names[position] = names[position].with_changes(comma=_closing(comma, last))
        elif isinstance(comma, cst.Comma) and above[index] is not None:
            lines = above[chosen[position + 1] - 1]
            names[position] = names[position].with_changes(comma=_with_lines(comma, lines))
    changed: dict[str, Any] = {"names": names}
    lpar = getattr(statement, "lpar", None)
    if lpar is not None and chosen[0] > 0:
        space = lpar.whitespace_after
        if isinstance(space, cst.ParenthesizedWhitespace):
            space = space.with_changes(empty_lines=above[chosen[0] - 1] or [])
            changed["lpar"] = lpar.with_changes(whitespace_after=space)
    return statement.with_changes(**changed)


def _above(comma: Any) -> list[cst.EmptyLine] | None:
    """The lines of their own behind a comma, which belong to the next name; None on one line."""
    space = comma.whitespace_after if isinstance(comma, cst.Comma) else None
    return list(space.empty_lines) if isinstance(space, cst.ParenthesizedWhitespace) else None


def _with_lines(comma: cst.Comma, lines: Sequence[cst.EmptyLine] | None) -> cst.Comma:
    space = comma.whitespace_after
    return comma.with_changes(whitespace_after=space.with_changes(empty_lines=lines or []))


def _closing(comma: Any, last: Any) -> Any:
    """The comma behind a name that has become the last one, laid out as the last one was."""
    space = comma.whitespace_after if isinstance(comma, cst.Comma) else None
    if not isinstance(space, cst.ParenthesizedWhitespace) or not isinstance(last, cst.Comma):
        return last
    final = last.whitespace_after
    if not isinstance(final, cst.ParenthesizedWhitespace):
        return last
    kept = final.with_changes(first_line=space.first_line)
    return comma.with_changes(whitespace_after=kept)


def _has_comment(comma: Any) -> bool:
    return isinstance(comma, cst.Comma) and bool(m.findall(comma, m.Comment()))


def _from(
    statement: ImportStatement,
    module: str,
    aliases: Sequence[cst.ImportAlias],
    chosen: Sequence[int],
) -> cst.ImportFrom:
    """``from module import …`` in the layout of the statement it comes from."""
    name = cst.parse_expression(module)
    assert isinstance(name, (cst.Attribute, cst.Name))
    if isinstance(statement, cst.ImportFrom):
        selected = cst.ensure_type(_selected(statement, aliases, chosen), cst.ImportFrom)
        new = selected.with_changes(module=name, semicolon=cst.MaybeSentinel.DEFAULT)
        return _aligned(new, _column(statement), _column(new))
    plain = [aliases[i].with_changes(comma=cst.MaybeSentinel.DEFAULT) for i in chosen]
    return cst.ImportFrom(module=name, names=plain)


def _column(statement: cst.ImportFrom) -> int:
    """Where the first name stands when it follows the parenthesis, counted from the statement."""
    bare = statement.with_changes(names=[cst.ImportAlias(cst.Name("x"))])
    return cst.Module([]).code_for_node(bare).find("x")


def _aligned(statement: cst.ImportFrom, old: int, new: int) -> cst.ImportFrom:
    """Move names that are aligned with the first one behind the parenthesis."""
    if isinstance(statement.names, cst.ImportStar):
        return statement
    names = []
    for alias in statement.names:
        comma = alias.comma
        space = comma.whitespace_after if isinstance(comma, cst.Comma) else None
        if isinstance(space, cst.ParenthesizedWhitespace) and space.last_line.value == " " * old:
            moved = space.with_changes(last_line=cst.SimpleWhitespace(" " * new))
            comma = cst.ensure_type(comma, cst.Comma).with_changes(whitespace_after=moved)
        names.append(alias.with_changes(comma=comma))
    return statement.with_changes(names=names)


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
