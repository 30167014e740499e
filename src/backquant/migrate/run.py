"""Migration of files and folders."""

from __future__ import annotations

import difflib
import fnmatch
import io
import os
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backquant.errors import UsageError
from backquant.files import replace_file
from backquant.migrate.notebook import migrate_notebook
from backquant.migrate.source import FileResult, Finding, migrate_source

# Which files are migrated, and how they are read and written.

SUFFIXES = (".py", ".pyi", ".ipynb")
_FOLDERS = """
.git .hg .svn .tox .nox .venv venv .mypy_cache .pytest_cache .ruff_cache .ipynb_checkpoints
__pycache__ __pypackages__ node_modules site-packages .eggs
"""
_SKIPPED = frozenset(_FOLDERS.split())


def find_files(paths: Iterable[Path], exclude: Iterable[str] = ()) -> list[Path]:
    """The Python files and notebooks below ``paths``, sorted, each once.

    Folders of version control, virtual environments and caches are skipped, and what matches one of
    the patterns in ``exclude``: by name, or by path below the folder given. Links are not followed.
    A file that is given itself is taken as it is. Raises UsageError for a path that does not exist.

    >>> find_files([Path(__file__)])[0].name
    'run.py'
    """
    patterns = tuple(exclude)
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found.update(dict.fromkeys(_below(path, patterns)))
        elif path.is_file():
            found[path] = None
        else:
            raise UsageError(
                f"{path} does not exist", where="PATH", fix="name a file or a folder of sources"
            )
    return list(found)


def _below(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for base, folders, files in os.walk(folder):
        here = Path(base)
        folders[:] = sorted(
            name for name in folders if not _skips_folder(here / name, folder, patterns)
        )
        for name in sorted(files):
            path = here / name
            wanted = path.suffix in SUFFIXES and not path.is_symlink()
            if wanted and not _is_excluded(path.relative_to(folder), patterns):
                yield path


def _skips_folder(path: Path, top: Path, patterns: tuple[str, ...]) -> bool:
    return (
        path.name in _SKIPPED
        or path.is_symlink()
        or (path / "pyvenv.cfg").exists()
        or _is_excluded(path.relative_to(top), patterns)
    )


def _is_excluded(path: Path, patterns: tuple[str, ...]) -> bool:
    whole = path.as_posix()
    return any(
        fnmatch.fnmatch(name, pattern.rstrip("/"))
        for pattern in patterns
        for name in (path.name, whole)
    )


def read_text(path: Path) -> tuple[str, str]:
    """The text of a Python file with its own line ends, and its encoding.

    Raises OSError, UnicodeDecodeError, or SyntaxError for an encoding that Python does not know.

    >>> read_text(Path(__file__))[1]
    'utf-8'
    """
    data = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def write_text(path: Path, text: str, encoding: str = "utf-8") -> None:
    """Replace a file in one step: whoever reads it sees the old text or the new one.

    A link stays a link; mode bits are kept. Raises OSError, with the file as it was.
    """
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} may not be written")
    replace_file(path, text.encode(encoding))


@dataclass(frozen=True)
class Migration:
    """What became of every file that was looked at.

    >>> Migration((FileResult("a.py", "x\\n", "y\\n"),)).is_clean
    False
    """

    files: tuple[FileResult, ...]

    @property
    def changed(self) -> tuple[FileResult, ...]:
        return tuple(result for result in self.files if result.changed)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for result in self.files for finding in result.findings)

    @property
    def is_clean(self) -> bool:
        """Whether nothing would change and nothing needs a person."""
        return not self.changed and not self.findings

    def diff(self) -> str:
        """All changes as one unified diff.

        >>> print(Migration((FileResult("a.py", "x\\n", "y\\n"),)).diff().splitlines()[-1])
        +y
        """
        return "".join(
            _with_end(line)
            for result in self.changed
            for line in difflib.unified_diff(
                result.before.splitlines(True),
                result.after.splitlines(True),
                f"a/{result.path.lstrip('/')}",
                f"b/{result.path.lstrip('/')}",
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Counts, files that change or need a person, and what needs one; for JSON.

        >>> Migration((FileResult("a.py", "x\\n", "y\\n"),)).to_dict()["counts"]["files"]
        1
        """
        notable = [result for result in self.files if result.changed or result.findings]
        return {
            "counts": {
                "files": len(self.files),
                "changed": len(self.changed),
                "written": sum(result.written for result in self.files),
                "held": sum(result.held for result in self.files),
                "needs_person": len(self.findings),
            },
            "files": [result.to_dict() for result in notable],
            "needs_person": [dict(vars(finding)) for finding in self.findings],
        }


def _with_end(line: str) -> str:
    return line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"


def migrate_paths(
    paths: Iterable[Path],
    *,
    exclude: Iterable[str] = (),
    write: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Migration:
    """Migrate every Python file and notebook below ``paths``.

    Args:
        exclude: patterns of names or relative paths to skip.
        write: replace the files that change; each in one step, and only after it was understood.
        progress: called with the number of files done, and of all.

    Raises UsageError for a path that does not exist. What is wrong with one file (it cannot be read,
    parsed or written) is a finding, and the others are migrated all the same.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "train.py").write_text("from torch.ao.quantization import QConfig\\n")
    ...     print(migrate_paths([Path(folder)]).changed[0].after, end="")
    from backquant.ao.quantization import QConfig
    """
    files = find_files(paths, exclude)
    results = []
    for index, path in enumerate(files):
        results.append(_migrate_file(path, write=write))
        if progress is not None:
            progress(index + 1, len(files))
    return Migration(tuple(results))


def _migrate_file(path: Path, *, write: bool) -> FileResult:
    name = str(path)
    try:
        text, encoding = read_text(path)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return FileResult(name, "", "", (_failed(name, "this file cannot be read", error),))
    migrate = migrate_notebook if path.suffix == ".ipynb" else migrate_source
    result = migrate(text, name)
    if not write or not result.changed:
        return result
    try:
        write_text(path, result.after, encoding)
    except (OSError, UnicodeEncodeError) as error:
        finding = _failed(name, "this file cannot be written", error)
        return replace(result, findings=(*result.findings, finding))
    return replace(result, written=True)


def _failed(path: str, what: str, error: Exception) -> Finding:
    return Finding(path, 0, 0, "file", what, str(error), "correct that and run migrate again")


# What became of the files, and what is left to a person, as text.


def report_text(migration: Migration) -> str:
    """The files that changed or were left; then, by reason, the places that need a person.

    >>> print(report_text(Migration((FileResult("a.py", "x\\n", "y\\n"),))))
    would change   a.py
    <BLANKLINE>
    1 file, 1 would change
    """
    states = [(_state(result), result.path) for result in migration.files]
    files = [f"{state:<14} {path}" for state, path in states if state]
    parts = ["\n".join(files), *_by_reason(migration.findings), _counts(migration)]
    return "\n\n".join(part for part in parts if part)


def _state(result: FileResult) -> str:
    if result.written:
        return "rewritten"
    if result.changed:
        return "would change"
    return "left as it is" if result.held else ""


def _by_reason(findings: tuple[Finding, ...]) -> list[str]:
    """A paragraph per reason: what and why, how, and every place."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.why, finding.how), []).append(finding)
    return [
        "\n".join([f"{kind}: {why}", f"  how  {how}", *(f"  {_place(f)}" for f in places)])
        for (kind, why, how), places in groups.items()
    ]


def _place(finding: Finding) -> str:
    where = f"{finding.path}:{finding.line}" if finding.line else finding.path
    return f"{where}  {finding.what}"


def _counts(migration: Migration) -> str:
    written = sum(result.written for result in migration.files)
    held = sum(result.held for result in migration.files)
    parts = [
        _number(len(migration.files), "file"),
        f"{written} rewritten" if written else "",
        f"{len(migration.changed) - written} would change"
        if len(migration.changed) > written
        else "",
        f"{held} left as they are" if held else "",
        f"{_number(len(migration.findings), 'place')} for a person" if migration.findings else "",
    ]
    counted = [part for part in parts if part]
    return ", ".join(counted) if len(counted) > 1 else f"{counted[0]}, nothing to do"


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" + ("" if count == 1 else "s")
