"""Files are replaced in one step: whoever reads one sees what was there before, or all of the new one.

1. What is new is written in a hidden folder beside the file, and renamed. Of several files that belong
   together the old ones are moved away first, the one that names the others before the rest; so it never
   stands beside parts that are not its own.
2. Such a folder is locked while its process lives. The next to write the same file removes what a process
   that was killed has left, and ends what it had begun to rename.
3. A link stays a link, and a file that is replaced keeps its mode.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from backquant.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows: nothing tells a folder that is in use from one that was left
    fcntl = None  # type: ignore[assignment]


_AT_ONCE = 64  # processes that write one file
_LOCK, _NEW, _READY, _OLD = "lock", "new", "ready", "old"
_ROOM = 1 << 16  # bytes
_PATIENCE = 10.0  # seconds; renaming takes less than a thousandth of one
_used: dict[Path, Path] = {}  # hidden folders of this process, each with the file that it is for


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder; a name that no file can have is none.

    >>> is_folder("."), is_folder("x" * 9999)
    (True, False)
    """
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for names that are too long


def replace_file(
    path: str | os.PathLike[str], content: bytes | Iterable[bytes | memoryview]
) -> None:
    """Write ``content``, which may come in pieces, under another name, then rename it; a link is written
    through.

    Raises ``OSError``; then ``path`` is as it was, and nothing else is left.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     replace_file(Path(folder) / "a.txt", b"all of it")
    ...     [file.read_text() for file in Path(folder).iterdir()]
    ['all of it']
    """
    try:
        target = Path(path).resolve()
    except (RuntimeError, ValueError) as error:  # links in a circle; a zero byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(target))
    pieces = (content,) if isinstance(content, bytes) else content
    try:
        with replacing(target) as staging, staging.open("xb") as stream:
            for piece in pieces:
                stream.write(piece)
    except OSError as error:
        if error.filename is None or ".backquant-" in str(error.filename):
            _rename(error, target)  # what the caller has named
        raise


def _rename(error: OSError, path: Path) -> None:
    error.filename = str(path)
    del error.filename2  # None would be said: "… -> None"


def write_text(path: str | os.PathLike[str], text: str, where: str) -> None:
    """Replace a file that the user has named; folders are made.

    Raises ``UsageError`` that names the file and ``where`` it was named.

    >>> write_text("/dev/null/page.html", "<svg>", "save_html(path)")
    Traceback (most recent call last):
    ...
    backquant.errors.UsageError: /dev/null/page.html cannot be written: File exists
      where  save_html(path)
      fix    make room, or name a file in a folder that can be written to
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, text.encode())
    except (OSError, ValueError) as error:  # a zero byte in the name
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"{target} cannot be written: {why}",
            where=where,
            fix="make room, or name a file in a folder that can be written to",
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name to write ``path`` under, in an empty folder; all that is there after the block is moved
    beside ``path``.

    Raises ``OSError``; then the files are as they were.

    >>> with workspace() as folder:
    ...     with replacing(folder / "a.txt") as staging:
    ...         _ = staging.write_text("all of it")
    ...     (folder / "a.txt").read_text()
    'all of it'
    """
    with _hidden(path) as slot:
        new = slot / _NEW
        new.mkdir()
        yield new / path.name
        written = sorted(new.iterdir(), key=lambda item: item.name == path.name)
        if not written or written[-1].name != path.name:
            raise FileNotFoundError(errno.ENOENT, "nothing was written", str(path))
        for item in written:
            _kept(item, path.parent / item.name)
        if len(written) == 1:
            written[0].replace(path)
        else:
            with _turn(path.parent):
                new.rename(slot / _READY)
                _publish(slot, path)
        _sync(path.parent)


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A folder among the temporary ones, for what nobody needs afterwards.

    >>> with workspace() as folder:
    ...     (folder / "weights.bin").write_bytes(b"abc")
    3
    >>> folder.exists()
    False
    """
    owner = os.geteuid() if fcntl else 0
    place = Path(tempfile.gettempdir())
    try:
        with _hidden(place / f"backquant-{owner}") as slot:
            folder = slot / _NEW
            folder.mkdir()
            try:
                yield folder
            except Exception as error:
                if not isinstance(error, OSError):
                    check_room(folder)
                raise
    except OSError as error:
        if error.filename is None or str(error.filename).startswith(str(place / ".backquant-")):
            _rename(error, place)  # what was in it is gone
        raise


def check_room(folder: Path) -> None:
    """Raise the ``OSError`` that the system has for those who write to ``folder``.

    For when a library has failed that tells no reason: each file there, and a new one, is made longer.
    """
    for path in [*folder.iterdir(), folder / "room"]:
        if path.name == "room" or path.is_file():
            with path.open("ab") as stream:
                stream.write(bytes(_ROOM))
                stream.flush()
                os.fsync(stream.fileno())


@contextlib.contextmanager
def _hidden(path: Path) -> Iterator[Path]:
    """A folder for ``path`` that this process holds."""
    key = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]  # of any name, and as short
    start = f".backquant-{key}-"
    try:
        with _claimed([path.parent / f"{start}{n}.tmp" for n in range(_AT_ONCE)], path) as slot:
            yield slot
    except _NoLocksError:
        slot = Path(tempfile.mkdtemp(prefix=start, suffix=".tmp", dir=path.parent))
        try:
            yield slot
        finally:
            _remove(slot, path)


class _NoLocksError(Exception):
    """The file system knows no locks: what is in use and what was left look the same."""


@contextlib.contextmanager
def _claimed(slots: list[Path], path: Path) -> Iterator[Path]:
    """The first of ``slots`` that nobody holds; the others that nobody holds are removed."""
    mine: Path | None = None
    lock: IO[bytes] | None = None
    try:
        for slot in slots:
            if mine is None:
                _used[slot] = path  # before it exists: see _leave
                lock = _held(slot, make=True)
                if lock is None:
                    _used.pop(slot, None)
                else:
                    mine = slot
                    _settle(slot, path)
            elif slot.exists():
                _remove_left(slot, path)
        if mine is None:
            raise OSError(errno.EBUSY, f"{_AT_ONCE} others are writing it", str(path))
        yield mine
    finally:
        if mine is not None and lock is not None:
            with lock:
                _remove(mine, path)
            _used.pop(mine, None)


def _held(slot: Path, *, make: bool = False) -> IO[bytes] | None:
    """The lock of ``slot``, which is given up when it is closed; None where another has it."""
    if fcntl is None:
        raise _NoLocksError
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                slot.mkdir(mode=0o700)
        about = slot.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return None  # of somebody else, in a folder that all write to
        stream = (slot / _LOCK).open("ab")
    except FileNotFoundError:
        return None  # removed by the one that had it
    except OSError:
        with contextlib.suppress(OSError):
            slot.rmdir()  # empty: there was room for the folder, and for nothing in it
        raise
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(stream.fileno()), (slot / _LOCK).stat()):
            return stream
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        stream.close()
        (slot / _LOCK).unlink(missing_ok=True)
        slot.rmdir()
        raise _NoLocksError from error
    stream.close()
    return None


def _settle(slot: Path, path: Path) -> None:
    """End what a process that was killed had begun, and empty the folder."""
    ready = slot / _READY / path.name
    if ready.exists() and not path.exists():
        with _turn(path.parent), contextlib.suppress(OSError):
            _publish(slot, path)
    for name in (_NEW, _READY, _OLD):
        shutil.rmtree(slot / name, ignore_errors=True)


def _remove_left(slot: Path, path: Path) -> None:
    """Remove what nobody holds."""
    held = _held(slot)
    if held is not None:
        with held:
            _remove(slot, path)


def _remove(slot: Path, path: Path) -> None:
    _settle(slot, path)
    with contextlib.suppress(OSError):
        (slot / _LOCK).unlink()
        slot.rmdir()


def _publish(slot: Path, path: Path) -> None:
    """Rule 1, for several files."""
    items = sorted((slot / _READY).iterdir(), key=lambda item: item.name == path.name)
    old = slot / _OLD
    old.mkdir(exist_ok=True)
    for item in items:
        if (path.parent / item.name).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), item.name)
    try:
        for item in reversed(items):
            with contextlib.suppress(FileNotFoundError):
                (path.parent / item.name).replace(old / item.name)
        for item in items:
            item.replace(path.parent / item.name)
    except OSError:
        for item in sorted(old.iterdir(), key=lambda item: item.name == path.name):
            item.replace(path.parent / item.name)
        shutil.rmtree(slot / _READY)
        raise


def _kept(item: Path, target: Path) -> None:
    """``item`` lies on the disk, with the mode of the file that it replaces."""
    if not item.is_file():
        return
    with item.open("rb") as stream:
        os.fsync(stream.fileno())
    with contextlib.suppress(FileNotFoundError):
        shutil.copymode(target, item)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process at a time renames several files in ``folder``, where it can be locked."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        end = time.monotonic() + _PATIENCE
        while fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.002)
                    continue
            except OSError:  # a file system that has no locks of folders
                pass
            break
        yield
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    """The new names lie on the disk, where the system can tell."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@atexit.register
def _leave() -> None:
    """Remove what an interrupt in the middle of removing has left."""
    for slot, path in list(_used.items()):
        with contextlib.suppress(_NoLocksError, OSError):
            _remove_left(slot, path)
