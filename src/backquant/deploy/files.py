"""Files of an export appear whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backquant.errors import ExportError, UsageError

__all__ = ["check_place", "staged"]


def check_place(path: Path, overwrite: bool) -> None:
    """Raise ``UsageError`` when a file is there already, or its folder is not.

    >>> check_place(Path("."), overwrite=True)
    Traceback (most recent call last):
    backquant.errors.UsageError: . is a folder
      where  path
      fix    name a file in it
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder", where="path", fix="name a file in it")
    if not path.parent.is_dir():
        raise UsageError(
            f"there is no folder {path.parent}", where="path", fix=f"mkdir -p {path.parent}"
        )
    if path.exists() and not overwrite:
        raise UsageError(
            f"{path} exists", where="path", fix="choose another name, or pass overwrite=True"
        )


@contextmanager
def staged(path: Path, files: list[Path]) -> Iterator[Path]:
    """A path in an empty folder beside ``path``; what is written there is moved when all went well.

    ``files`` is filled with where the files are then, ``path`` first.
    """
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        staging = folder / path.name
        yield staging
        written = sorted(folder.iterdir(), key=lambda item: item != staging)
        if staging not in written:
            raise ExportError(f"the target wrote no {path.name}", where=str(path))
        for item in reversed(written):  # the named file last: it refers to the others
            item.replace(path.parent / item.name)
        files += [path.parent / item.name for item in written]
    except OSError as error:
        raise ExportError(
            f"{path} cannot be written: {error.strerror or error}",
            where=str(path),
            fix="make room, or choose a folder that can be written to",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
