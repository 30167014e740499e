"""Files are replaced in one step: whoever reads one sees what was there before, or all of the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content`` under another name beside ``path``, then rename it.

    A link stays a link, and a file that is replaced keeps its mode. Raises ``OSError``; then ``path`` is as
    it was, and nothing else is left.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     replace_file(Path(folder) / "a.txt", b"all of it")
    ...     [file.read_text() for file in Path(folder).iterdir()]
    ['all of it']
    """
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
