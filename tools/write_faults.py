"""Everything that writes files, under faults: a full disk, a folder without permission, odd names, others.

    python tools/write_faults.py                            # as root: mounts small file systems
    python tools/write_faults.py --only openvino --fault limit names

Each attempt is a fork that writes once. Afterwards the files are whole, the old ones or the new ones; where
it failed, an error of ours names the file (or the folder of temporary files) and says what the system said;
and nothing else lies in the folder or among the temporary files. Exit status 1 where that is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import io
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tools.writers import OLD, SLOW, SUFFIXES, writer

from backquant.errors import BackquantError

CAUSES = (
    "File too large",
    "No space left on device",
    "Read-only file system",
    "Permission denied",
    "Disk quota exceeded",
    "may not be written",
)
NAMES = ("a b'c\" ü 模型", "line\nfeed", "-x", "%s{0}$HOME", "x" * 200)
F_SETPIPE_SZ, PIPE = 1031, 1 << 20
#: Instructions of a filter of system calls (``linux/filter.h``), and the numbers of calls on x86-64.
_EQUAL, _LARGER, _AT_LEAST, _BITS = 0x15, 0x25, 0x35, 0x45
_LOAD_CALL, _LOAD_FIRST, _LOAD_THIRD = ((0x20, 0, 0, at) for at in (0, 16, 32))
_ALLOW, _REFUSE = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.EDQUOT)
_WRITE, _PWRITE, _WRITEV, _FALLOCATE, _FTRUNCATE = 1, 18, 20, 285, 77
_MKDIR, _MKDIRAT, _OPENAT = 83, 258, 257
Write = Callable[[Path], object]
Before = Callable[[], object]  # in the child, before it writes


class Place:
    """Folders of one attempt: of the files and of the temporary ones."""

    def __init__(self, kind: str, root: Path, stem: str = "model") -> None:
        self.folder, self.temporary = root / "files", root / "temporary"
        for folder in (self.folder, self.temporary):
            folder.mkdir()
        self.names = [stem + suffix for suffix in SUFFIXES[kind]]
        self.old = OLD.get(kind, b"old")
        self.failed = 1 if kind == "migrate" else 2  # the status; 1: something needs a person
        self.path = self.folder / (self.names[0] if self.names else stem)

    def fill(self) -> None:
        """The old files."""
        if self.old is not None:
            for name in self.names:
                (self.folder / name).write_bytes(self.old)

    def found(self) -> dict[str, bytes]:
        return {item.name: item.read_bytes() for item in self.folder.iterdir() if item.is_file()}

    def litter(self) -> list[str]:
        mine = set(self.names)
        here = [item.name for item in self.folder.iterdir() if item.name not in mine]
        there = [item.name for item in self.temporary.iterdir()]
        return here + [name for name in there if not name.startswith("torchinductor_")]  # PyTorch's


def child(place: Place, write: Write, before: Before = lambda: None) -> tuple[int, int]:
    """A process that writes, and the end of a pipe that its words come out of."""
    out, into = os.pipe()
    fcntl.fcntl(into, F_SETPIPE_SZ, PIPE)
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    status = 70
    try:
        os.dup2(into, 1)
        os.dup2(into, 2)
        torch.set_num_threads(1)
        tempfile.tempdir = os.environ["TMPDIR"] = str(place.temporary)
        before()
        write(place.path)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BackquantError as error:
        os.write(2, f"\n{error}".encode())
        status = 2
    except BaseException:
        os.write(2, traceback.format_exc()[-9000:].encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(started: tuple[int, int]) -> tuple[int, str]:
    """Its status and its words."""
    pid, out = started
    _, status = os.waitpid(pid, 0)
    with os.fdopen(out, "rb") as stream:
        return os.waitstatus_to_exitcode(status), stream.read().decode(errors="replace")


def judged(place: Place, status: int, words: str, new: dict[str, bytes]) -> str:
    """What an attempt left: ``new``, ``said`` (an error of ours and the old files), or a defect."""
    if place.litter():
        return f"litter: {place.litter()}"
    found = place.found()
    old = {} if place.old is None else dict.fromkeys(new, place.old)
    if status == 0:
        return "new" if found == new else "no error, and not the new files"
    part = {name: new[name] for name in found if found[name] == new.get(name)}
    if found != {**old, **part} or (part and "model.bin" in new and part != new):
        return f"neither the old files nor the new ones: {words[-600:]}"
    named = [place.path.stem, str(place.folder), str(place.temporary), repr(place.path.stem)[1:-1]]
    if status != place.failed or not any(name in words for name in named):
        return f"status {status}, and it does not say where: {words[-900:]}"
    if not any(cause in words for cause in CAUSES):
        return f"it does not say why: {words[-900:]}"
    return "said"


def limit(size: int) -> Before:
    """No file may grow beyond so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def powerless() -> None:
    """Root without the right to ignore permissions."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0 and libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory at ``folder``."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


Attempt = Iterator[tuple[str, str]]  # what was tried, and what came of it


def of_limits(kind: str, write: Write, root: Path, new: dict[str, bytes]) -> Attempt:
    lengths = sorted(
        {0, 1, 100, *(n for text in new.values() for n in (len(text) // 2, len(text) - 1))}
    )
    for size in lengths:
        place = Place(kind, fresh(root))
        place.fill()
        status, words = ended(child(place, write, limit(size)))
        yield f"files of {size} bytes", judged(place, status, words, new)


def quota(count: int) -> Before:
    """The kernel refuses every write of ``count`` bytes or more with ``EDQUOT``, as a quota does; with 0, any
    write, and each new file or folder, too. Output and errors are written as ever. A filter of system calls:
    no file system with quotas is needed."""

    def begin() -> None:
        rules = [_LOAD_CALL]
        for call in (_WRITE, _PWRITE):
            # this call, no output or error, and so many bytes: refused
            rules += [(_EQUAL, 0, 5, call), _LOAD_FIRST, (_LARGER, 0, 3, 2), _LOAD_THIRD]
            rules += [(_AT_LEAST, 0, 1, count), _REFUSE, _LOAD_CALL]
        rules += [(_EQUAL, 0, 3, _WRITEV), _LOAD_FIRST, (_LARGER, 0, 1, 2), _REFUSE, _LOAD_CALL]
        if not count:
            for call in (_FALLOCATE, _FTRUNCATE, _MKDIR, _MKDIRAT):
                rules += [(_EQUAL, 0, 1, call), _REFUSE]
            rules += [(_EQUAL, 0, 3, _OPENAT), _LOAD_THIRD, (_BITS, 0, 1, os.O_CREAT), _REFUSE]
        packed = b"".join(struct.pack("HBBI", *rule) for rule in (*rules, _ALLOW))
        held = ctypes.create_string_buffer(packed)
        program = struct.pack("HxxxxxxQ", len(packed) // 8, ctypes.addressof(held))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")

    return begin


def of_quota(kind: str, write: Write, root: Path, new: dict[str, bytes]) -> Attempt:
    longest = max(map(len, new.values()), default=0)
    for size in sorted({0, 1, 300, longest // 4 + 1}):
        place = Place(kind, fresh(root))
        place.fill()
        status, words = ended(child(place, write, quota(size)))
        yield f"quota: writes of {size} bytes", judged(place, status, words, new)


def of_permission(kind: str, write: Write, root: Path, new: dict[str, bytes]) -> Attempt:
    for mode, what in ((0o555, "a folder"), (0o444, "a file")):
        place = Place(kind, fresh(root))
        place.fill()
        for item in [place.folder] if mode == 0o555 else place.folder.iterdir():
            item.chmod(mode)
        status, words = ended(child(place, write, powerless))
        place.folder.chmod(0o755)
        yield f"{what} that may not be written", judged(place, status, words, new)


def of_disks(kind: str, write: Write, root: Path, new: dict[str, bytes]) -> Attempt:
    """Small file systems at the folder of the files."""
    total = sum(map(len, new.values())) // 1024
    sizes = sorted({8, total // 2 + 8, total + 4, total + 12})
    for options in [*(f"size={size}k" for size in sizes), *(f"nr_inodes={n}" for n in (4, 6, 7))]:
        place = Place(kind, fresh(root))
        with mounted(place.folder, options):
            place.fill()
            status, words = ended(child(place, write))
            yield options, judged(place, status, words, new)
    place = Place(kind, fresh(root))
    with mounted(place.folder, "size=1m"):
        place.fill()
        subprocess.run(["mount", "-o", "remount,ro", str(place.folder)], check=True)
        status, words = ended(child(place, write))
        yield "read-only", judged(place, status, words, new)


def of_temporary(kind: str, write: Write, root: Path, new: dict[str, bytes]) -> Attempt:
    """The same, at the folder of temporary files."""
    for options in ("size=4k", "size=8k", "size=16k", "size=64k,nr_inodes=3", "size=64k,ro"):
        place = Place(kind, fresh(root))
        place.fill()
        with mounted(place.temporary, options):
            status, words = ended(child(place, write))
            yield f"temporary files: {options}", judged(place, status, words, new)


def of_links(kind: str, write: Write, root: Path, new: dict[str, bytes]) -> Attempt:
    for there in (True, False):
        place = Place(kind, fresh(root))
        if not place.names or (place.old is None and there):
            return
        place.fill()
        other = place.folder.parent / "other"
        other.mkdir()
        if there:
            place.path.rename(other / "target")
        else:
            place.path.unlink(missing_ok=True)
        place.path.symlink_to(other / "target")
        if kind == "migrate":  # follows no links
            continue
        status, words = ended(child(place, write))
        left = [item.name for item in other.iterdir() if item.name != "target"]
        outcome = f"litter: {left}" if left else judged(place, status, words, new)
        yield f"a link to a file{'' if there else ' that is not there'}", outcome


def of_names(kind: str, write: Write, root: Path, _: dict[str, bytes]) -> Attempt:
    for name in NAMES:
        place = Place(kind, fresh(root), name)
        if place.names:
            place.fill()
            status, words = ended(child(place, write))
            outcome = judged(place, status, words, place.found())
            yield (
                repr(name[:20]),
                outcome if outcome == "new" else f"{status} {outcome} {words[-500:]}",
            )


def of_many(kind: str, write: Write, root: Path, new: dict[str, bytes]) -> Attempt:
    place = Place(kind, fresh(root))
    if place.names:
        place.fill()
        ends = [ended(started) for started in [child(place, write) for _ in range(4)]]
        for status, words in ends:
            yield "four at once", judged(place, status, words, new)


FAULTS = {
    "limit": of_limits,
    "quota": of_quota,
    "permission": of_permission,
    "disk": of_disks,
    "temporary": of_temporary,
    "link": of_links,
    "names": of_names,
    "many": of_many,
}
MOUNTS = ("disk", "temporary")
HAS_FILTER = sys.platform == "linux" and platform.machine() == "x86_64"


def fresh(root: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    return root


def attempts(kind: str, faults: Sequence[str], root: Path) -> Attempt:
    """All faults of one writer."""
    write = writer(kind)
    place = Place(kind, fresh(root))
    place.fill()
    # once here: what is imported at the first time does not meet the fault
    tempfile.tempdir = str(place.temporary)
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        write(place.path)
    tempfile.tempdir = None
    place = Place(kind, fresh(root))
    place.fill()
    status, words = ended(child(place, write))
    assert status == 0, words
    new = place.found()
    if place.litter():
        yield "no fault", f"litter: {place.litter()}"
    for fault in faults:
        yield from FAULTS[fault](kind, write, root, new)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    fast = [kind for kind in SUFFIXES if kind not in SLOW]
    can = [fault for fault in FAULTS if os.geteuid() == 0 or fault not in MOUNTS]
    can = [fault for fault in can if HAS_FILTER or fault != "quota"]
    parser.add_argument("--only", nargs="+", choices=list(SUFFIXES), default=fast)
    parser.add_argument("--fault", nargs="+", choices=list(FAULTS), default=can)
    chosen = parser.parse_args(arguments)
    defects = 0
    for kind in chosen.only:
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for what, outcome in attempts(kind, chosen.fault, Path(folder, "attempt")):
                good = outcome in ("new", "said")
                counts[outcome if good else "DEFECT"] += 1
                if not good:
                    print(f"{kind}: {what}: {outcome}", flush=True)
        tempfile.tempdir = None
        print(
            f"{kind:16}", ", ".join(f"{n} {outcome}" for outcome, n in counts.items()), flush=True
        )
        defects += counts["DEFECT"]
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
