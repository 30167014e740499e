"""What a process may not do while a file is loaded and called: an audit hook of Python that notes it."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

from backquant.graph.call_table import _not_called

_words = re.compile(r"\S+").findall
FORBIDDEN = frozenset(
    _words("""
    exec compile subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty
    socket.connect socket.bind socket.sendto ctypes.dlopen ctypes.dlsym os.remove os.rename os.mkdir os.rmdir
    os.chmod os.link os.symlink os.truncate os.putenv shutil.rmtree marshal.loads pickle.find_class
    sys.addaudithook
    """)
)
#: Packages whose modules may be imported at the first use of something.
PACKAGES = frozenset({"torch", "backquant", "numpy", *sys.stdlib_module_names})
_MEASURED = "/proc/self/clear_refs"  # what fuzz_artifact.py itself writes to


class Watch:
    """Notes forbidden events between ``begin()`` and ``end()``, once it is installed, which is for good.

    What modules execute while they are imported is not noted, but their names are, where they are beyond
    ``PACKAGES``.
    """

    def __init__(self) -> None:
        self._noted: list[str] | None = None

    def install(self) -> None:
        """Hooks are not taken away again: for processes of their own."""
        sys.addaudithook(self._hook)

    def begin(self) -> None:
        self._noted = []

    def end(self) -> str:
        """What was noted; nothing, if all is well."""
        noted, self._noted = self._noted or [], None
        return "; ".join(dict.fromkeys(noted))

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._noted is None:
            return
        if event == "import" and str(args[0]).partition(".")[0] not in PACKAGES:
            self._noted.append(f"import {ascii(args[0])[:80]}")
        if _is_forbidden(event, args) and not _is_import(sys._getframe()):
            self._noted.append(f"{event} {ascii(args)[:120]}")


def _is_forbidden(event: str, args: tuple[Any, ...]) -> bool:
    """A code object is one of our own, which raises, with other names of variables: a signature."""
    if event == "open":
        written = isinstance(args[1], str) and bool(set(args[1]) & set("wax+"))
        return written and args[0] != _MEASURED
    if event == "code.__new__":
        return bool(args[0] != _not_called.__code__.co_code)
    return event in FORBIDDEN


def _is_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
