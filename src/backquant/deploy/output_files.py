"""Files of an export appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backquant.errors import ExportError, UsageError
from backquant.files import is_folder, replacing


def check_place(path: Path, overwrite: bool) -> None:
    """Raise ``UsageError`` when a file is there already, or its folder is not.

    >>> check_place(Path("."), overwrite=True)
    Traceback (most recent call last):
    backquant.errors.UsageError: . is a folder
      where  path
      fix    name a file in it
    """
    if is_folder(path):
        raise UsageError(f"{path} is a folder", where="path", fix="name a file in it")
    if not is_folder(path.parent):
        raise UsageError(
            f"there is no folder {path.parent}", where="path", fix=f"mkdir -p {path.parent}"
        )
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{path} exists", where="path", fix="overwrite=True   # or another name")


@contextmanager
def staged(path: Path, files: list[Path]) -> Iterator[Path]:
    """A path in an empty folder beside ``path``; what is written there is moved when all went well.

    ``files`` is filled with where the files are then, ``path`` first. A link is replaced by the file, so
    that what belongs together lies together.
    """
    try:
        with replacing(path) as staging:
            yield staging
            names = sorted(staging.parent.iterdir(), key=lambda item: item != staging)
            if staging not in names:
                raise ExportError(f"the target wrote no {path.name}", where=str(path))
        files += [path.parent / item.name for item in names]
    except OSError as error:
        elsewhere = error.filename is not None and Path(error.filename).is_dir()
        raise ExportError(
            f"{path} cannot be written: {error.strerror or error}"
            + (f" in {error.filename}" if elsewhere else ""),
            where=str(path),
            fix="make room, or choose a folder that can be written to",
        ) from error
