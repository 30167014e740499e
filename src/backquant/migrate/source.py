"""Migration of one Python source: the prefix of names is replaced, and what needs a person is listed."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from backquant.ao.left_out import GROUPS, Group
from backquant.ao.table import table

# From a dotted name of PyTorch's quantization to that of the mirror, and to why a name is left out.


#: Older spellings of packages; what was migrated before is read as it was.
_ALIASES = (
    (r"torch\.quantization\.(?=_numeric_suite)", "torch.ao.ns."),
    (r"torch\.nn\.quantized\._reference\b", "torch.ao.nn.quantized.reference"),
    (r"torch\.(?=(quantization|nn\.(quantizable|intrinsic|quantized|qat))\b)", "torch.ao."),
    (r"backquant\.ao\b", "torch.ao"),
)
_ENGINE = Group(
    "engine",
    "the engine is not a setting of the process: every model has its own, from its backend",
    "remove it and name the backend: prepare_fx(..., "
    'backend_config=backquant.get_backend_config("x86"))',
)
_SCRIPT = Group(
    "TorchScript",
    "a converted model cannot be scripted or traced",
    "backquant.save(quantized, path) stores it, quantized.compile() makes it fast, and "
    "backquant.export takes it elsewhere",
)
UNKNOWN = Group(
    "unknown name",
    "no version of PyTorch that is known here has it",
    "check the spelling; keep the import if the name is your own addition",
)
HOLDING = frozenset(GROUPS[key] for key in ("inside", "torchscript", "pt2e"))


def canonical(path: str) -> str:
    """The name under ``torch.ao`` of another spelling.

    >>> canonical("torch.quantization.QConfig"), canonical("backquant.ao.nn.qat")
    ('torch.ao.quantization.QConfig', 'torch.ao.nn.qat')
    """
    for old, new in _ALIASES:
        path = re.sub(f"^{old}", new, path)
    return path


def mirrored(path: str) -> str | None:
    """The name in the mirror of a dotted name of PyTorch; None where it is not PyTorch's quantization.

    >>> mirrored("torch.quantization.QConfig"), mirrored("torch.nn.quantized")
    ('backquant.ao.quantization.QConfig', 'backquant.ao.nn.quantized')
    """
    parts = canonical(path).split(".")
    if parts[:2] != ["torch", "ao"] or parts[2:3] not in (["quantization"], ["nn"]):
        return None
    return None if path.startswith("backquant.") else ".".join(["backquant", *parts[1:]])


def left_to_person(path: str) -> Group | None:
    """Why a dotted name needs a person; None where it does not.

    >>> left_to_person("torch.ao.quantization.quantize_jit").kind, left_to_person("torch.nn.Linear")
    ('TorchScript', None)
    """
    path = canonical(path)
    if path.startswith("torch.backends.quantized"):
        return _ENGINE
    if path.startswith(("torch.jit.script", "torch.jit.trace")):
        return _SCRIPT
    if path.startswith("torch.ao.ns"):
        return GROUPS["numeric-suite"]
    parts = path.split(".")
    if parts[:2] != ["torch", "ao"] or parts[2:3] not in (["quantization"], ["nn"]):
        return None
    count = len(parts)
    while ".".join(parts[2:count]) not in table():
        count -= 1
    parent = table().get(".".join(parts[2 : len(parts) - 1]), {})
    if count == len(parts) and parts[-1] not in parent:
        homes = {entry.home for entry in table()[".".join(parts[2:])].values()}
        return GROUPS[homes.pop()[1:]] if len(homes) == 1 and min(homes)[0] == "!" else None
    count = min(count, len(parts) - 1)  # a function may be called as its module
    entry = table()[".".join(parts[2:count])].get(parts[count])
    if entry is None:
        return UNKNOWN
    return GROUPS[entry.home[1:]] if entry.home.startswith("!") else None


# What migration leaves to a person, and what became of a file: values.


@dataclass(frozen=True, order=True)
class Finding:
    """One place that needs a person: where, what, why, and how.

    ``path`` is the file as it was asked for (a notebook has ``#cell N`` behind it); ``line`` counts
    from 1 in the file as it was. ``holds`` says that the file was left as it is because of it.

    >>> print(Finding("a.py", 3, 0, "TorchScript", "quantize_jit", "no counterpart", "use prepare_fx"))
    a.py:3: quantize_jit (TorchScript)
      why  no counterpart
      how  use prepare_fx
    """

    path: str
    line: int
    column: int
    kind: str
    what: str
    why: str
    how: str
    holds: bool = False

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.what} ({self.kind})\n  why  {self.why}\n  how  {self.how}"


@dataclass(frozen=True)
class FileResult:
    """What became of one file: its text before and after, and what a person has to do.

    ``after`` equals ``before`` where nothing changes. ``written``: the file on disk holds ``after``.

    >>> FileResult("a.py", "x\\n", "y\\n").changed
    True
    """

    path: str
    before: str
    after: str
    findings: tuple[Finding, ...] = ()
    written: bool = field(default=False, compare=False)

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def held(self) -> bool:
        """Whether the file was left as it is because part of it has no counterpart."""
        return any(finding.holds for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Path, what happened, and the number of findings, for JSON."""
        return {
            "path": self.path,
            "changed": self.changed,
            "written": self.written,
            "held": self.held,
            "findings": len(self.findings),
        }


_PART = re.compile(r"\b(ao|quantization|quantized|quantizable|intrinsic|qat)\b")
_DOTTED = re.compile(r"[a-z]\w*(\.\w+)+")
_KEYWORDS = {
    "prepare_custom_config_dict": "prepare_custom_config",
    "convert_custom_config_dict": "convert_custom_config",
    "fuse_custom_config_dict": "fuse_custom_config",
    "backend_config_dict": "backend_config",
    "qconfig_dict": "qconfig_mapping",
    "is_reference": "convert_to_reference_fx",
}
_OLD = Group(
    "old keyword",
    "PyTorch 1.13 renamed this parameter",
    "use the newer name; a dict goes on to work",
)
_STRING = Group(
    "name in a string", "a string may be read by what looks for this module", "change it if it is"
)
_STORED = Group(
    "patched name",
    "PyTorch's module is changed at run time; backquant does not read what is put there",
    "pass the changed object where it is needed, e.g. in a QConfig",
)
_AMBIGUOUS = Group(
    "ambiguous name",
    "this name may be bound to something else as well",
    "give the import another name",
)


def mentions_quantization(text: str) -> bool:
    """Whether a text may have something to migrate: cheap, true rather too often than too seldom."""
    return ("torch" in text or "backquant" in text) and _PART.search(text) is not None


def migrate_source(text: str, path: str = "<text>") -> FileResult:
    """Rewrite a Python source from ``torch.ao`` to ``backquant.ao``: names change, nothing else does.

    A source that uses a flow without counterpart (TorchScript, PT2E) is left as it is, since
    what it shares with that flow, QConfigs and observers, would be of two libraries. Broken Python raises
    nothing: it is a finding.

    >>> print(migrate_source("from torch.ao.quantization import QConfig\\n").after, end="")
    from backquant.ao.quantization import QConfig
    """
    if not mentions_quantization(text):
        return FileResult(path, text, text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the text, not of ours: invalid escapes
            tree = ast.parse(text)
            source = _Source(text, path, tree)
            source.read()
            after = source.after()
            ast.parse(after)  # never give back what cannot be read
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return FileResult(path, text, text, (_broken(path, error),))
    findings = tuple(sorted(set(source.findings)))
    if any(finding.holds for finding in findings):
        after = text
    return FileResult(path, text, after, findings)


def _broken(path: str, error: BaseException) -> Finding:
    line, column = getattr(error, "lineno", 0) or 0, getattr(error, "offset", 0) or 0
    why = getattr(error, "msg", "") or str(error) or "Python's own limit of nesting is reached"
    what, how = "this file is not valid Python", "correct it and run migrate again"
    return Finding(path, line, column, "syntax error", what, why, how)


@dataclass
class _Source:
    """One source: where its names come from, the edits by byte, and what needs a person."""

    text: str
    path: str
    tree: ast.Module
    edits: dict[tuple[int, int], str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    targets: set[str] = field(default_factory=set)
    imported: dict[str, dict[str, list[ast.stmt]]] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)
    kept_roots: set[str] = field(default_factory=set)
    hidden_roots: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lines = self.text.encode().splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def read(self) -> None:
        """Collect edits and findings."""
        nodes = list(ast.walk(self.tree))
        for node in nodes:
            self._bind(node)
        for chain, node in _chains(self.tree):
            self._use(chain, node)
        for node in nodes:
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                self._import_from(node, node.module)
            elif isinstance(node, ast.keyword) and node.arg in _KEYWORDS:
                self._report(node, f"{node.arg}, now {_KEYWORDS[node.arg]}", _OLD)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                new = mirrored(node.value) if _DOTTED.fullmatch(node.value) else None
                if new is not None:
                    self._report(node, f"{node.value}, now {new}", _STRING)
        if not self.edits and not self.targets:  # TorchScript of models that are not quantized here
            self.findings = [f for f in self.findings if not f.what.startswith("torch.jit.")]

    def after(self) -> str:
        """The text with all edits."""
        data = self.text.encode()
        for (start, end), new in sorted(self.edits.items(), reverse=True):
            data = data[:start] + new.encode() + data[end:]
        return data.decode()

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = module + alias.name
                root = whole if alias.asname or module else whole.partition(".")[0]
                name = alias.asname or (alias.name if module else root)
                self.imported.setdefault(name, {}).setdefault(root, []).append(node)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.bound.add(node.id)
        elif isinstance(node, ast.arg):
            self.bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.bound.add(node.name)

    def _use(self, chain: list[str], node: ast.expr) -> None:
        """A dotted name that begins with an imported one."""
        for root, statements in self.imported.get(chain[0], {}).items():
            path = ".".join([root, *chain[1:]])
            new, ours = mirrored(path), mirrored(root) is not None
            reason = left_to_person(path)
            hidden = not ours and chain[0] in self.bound
            if new is not None and hidden:
                reason = _AMBIGUOUS
            elif new is not None and not isinstance(getattr(node, "ctx", None), ast.Load):
                reason = reason or _STORED
            if reason is not None:
                self._report(node, canonical(path), reason)
            if new is None or hidden:
                (self.kept_roots if new is None else self.hidden_roots).add(chain[0])
                continue
            self.targets.update(chain)
            if not ours:
                self.edits[self._range(node)] = new
                for statement in _without_ours(statements, node):
                    self._insert(statement, "import backquant.ao")

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            new = mirrored(alias.name)
            reason = left_to_person(alias.name)
            if reason is UNKNOWN:  # what is left out can be imported
                self._report(alias, alias.name, reason)
            if new is None:
                continue
            start, _ = self._range(alias)
            root = alias.name.partition(".")[0]
            before = [
                s for s in self.imported.get(root, {}).get(root, []) if s.lineno < node.lineno
            ]
            alone = all(_replaces(s) or s.col_offset for s in before)
            if not alias.asname and root in self.hidden_roots:  # its uses stay, and need the module
                more = f"{alias.name}, "
                if new in {other.name for other in node.names}:
                    continue
            else:
                kept = not alias.asname and alone and root in self.kept_roots
                more = f"{root}, " if kept else ""
            self.edits[(start, start + len(alias.name))] = more + new

    def _import_from(self, node: ast.ImportFrom, module: str) -> None:
        for alias in node.names:
            whole = module if alias.name == "*" else f"{module}.{alias.name}"
            reason = left_to_person(whole)
            if reason is UNKNOWN:
                self._report(alias, canonical(whole), reason)
            if mirrored(whole) is not None:
                self.targets.add(alias.name)
        new = mirrored(module)
        if new is not None:
            start, end = self._range(node)
            head = self.text.encode()[start:end]
            at = head.find(module.encode())
            if at >= 0:
                self.edits[(start + at, start + at + len(module))] = new
            return
        moved = [a for a in node.names if mirrored(f"{module}.{a.name}") is not None]
        if moved:
            parents = {(mirrored(f"{module}.{a.name}") or "").rpartition(".")[0] for a in moved}
            parts = [_from(parent, moved) for parent in sorted(parents)]
            kept = [alias for alias in node.names if alias not in moved]
            parts = [_from(module, kept), *parts] if kept else parts
            self.edits[self._range(node)] = self._separator(node).join(parts)

    def _insert(self, statement: ast.stmt, line: str) -> None:
        self.edits[(self._range(statement)[0],) * 2] = line + self._separator(statement)

    def _separator(self, statement: ast.stmt) -> str:
        """What stands between a statement and one that is added: a line end, or a semicolon."""
        line = self.lines[statement.lineno - 1]
        before = line[: statement.col_offset].decode()
        end = "\r\n" if line.endswith(b"\r\n") else "\n"
        return "; " if before.strip() else end + before

    def _range(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[end_line - 1] + end_column

    def _report(
        self, node: ast.stmt | ast.expr | ast.alias | ast.keyword, what: str, group: Group
    ) -> None:
        place = (self.path, node.lineno, node.col_offset)
        self.findings.append(
            Finding(*place, group.kind, what, group.why, group.fix, group in HOLDING)
        )


def _without_ours(statements: list[ast.stmt], use: ast.expr) -> list[ast.stmt]:
    """The imports to put ours before: the first of the module, if there is one, else all in blocks."""
    top = [s for s in statements if s.col_offset == 0]
    if any(_replaces(s) and s.lineno <= use.lineno for s in top):
        return []
    return [s for s in top[:1] or statements if not _replaces(s)]


def _replaces(statement: ast.stmt) -> bool:
    """Whether an import of packages becomes one of ``backquant``."""
    return isinstance(statement, ast.Import) and any(mirrored(a.name) for a in statement.names)


def _from(module: str, aliases: list[ast.alias]) -> str:
    names = ", ".join(f"{a.name} as {a.asname}" if a.asname else a.name for a in aliases)
    return f"from {module} import {names}"


def _chains(node: ast.AST) -> Iterator[tuple[list[str], ast.expr]]:
    """Every dotted name that is read or stored, as far as it goes."""
    parts: list[str] = []
    inner: ast.AST = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name) and isinstance(node, ast.expr):
        yield [inner.id, *reversed(parts)], node
        return
    for child in ast.iter_child_nodes(inner):
        yield from _chains(child)
