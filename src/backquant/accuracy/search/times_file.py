"""Times of kernels that were measured before on this machine, in a file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from backquant.errors import BackquantError
from backquant.files import replace_file
from backquant.json_text import read_json


class TimesFile:
    """Seconds by kernel and shape, for one machine, number of threads and version of what runs there.

    ``folder`` ``None``: nothing is kept. A file that cannot be read or written is as if it were not there.

    >>> from backquant.files import workspace
    >>> with workspace() as folder:
    ...     TimesFile(folder, "x86").keep({"linear 1x64": 2e-6})
    ...     TimesFile(folder, "x86").known, TimesFile(folder, "onednn").known
    ({'linear 1x64': 2e-06}, {})
    """

    def __init__(self, folder: str | os.PathLike[str] | None, runs_on: str) -> None:
        self.path: Path | None = None
        self.known: dict[str, float] = {}
        if folder is not None:
            what = (runs_on, torch.__version__, torch.get_num_threads(), _machine())
            name = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
            self.path = Path(folder) / f"times-{name}.json"
            self.known = _read(self.path)

    def keep(self, found: Mapping[str, float]) -> None:
        """Add what was measured."""
        if found.keys() <= self.known.keys():
            return
        self.known = {**found, **self.known}
        if self.path is None:
            return
        self.known = {**_read(self.path), **self.known}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(self.known).encode())
        except (OSError, BackquantError):
            self.path = None


def usual_folder() -> Path:
    """The default folder for times: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "backquant"


def _read(path: Path) -> dict[str, float]:
    try:
        data = read_json(path.read_text(encoding="utf-8"))
        return {str(key): float(value) for key, value in data.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _machine() -> tuple[str, ...]:
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return platform.node(), platform.machine(), name, torch.backends.cpu.get_cpu_capability()
