"""Migration of files and folders."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backquant.migrate.finding import FileResult, Finding
from backquant.migrate.notebook import migrate_notebook
from backquant.migrate.source import migrate_source
from backquant.migrate.sources import find_files, read_text, write_text


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
