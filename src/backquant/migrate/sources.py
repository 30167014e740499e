"""Which files are migrated, and how they are read and written."""

from __future__ import annotations

import fnmatch
import io
import os
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from backquant.errors import UsageError
from backquant.files import replace_file

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
    'sources.py'
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
