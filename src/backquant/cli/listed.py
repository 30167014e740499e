"""What is known about descriptions without importing one, and with it torch: generated files of this
package (``tools/generate_backend_docs.py`` writes them, CI compares them)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from backquant.files import replace_file
from backquant.version import __version__

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOM = _PACKAGE / "backend_config"
_ENTRY_POINTS = "backquant.backends"


class ListedBackend(NamedTuple):
    """A line of ``backquant backends``."""

    name: str
    engine: str | None
    entries: int


def listed_backends() -> list[ListedBackend]:
    """All backends, in the order of ``list_backends()``. Descriptions of other packages are imported.

    >>> [backend.name for backend in listed_backends()][:2]
    ['native', 'fbgemm']
    """
    stored = json.loads((_ROOM / "built_in.json").read_text(encoding="utf-8"))
    known = [ListedBackend(**values) for values in stored]
    names = {backend.name for backend in known}
    if all(point.name in names for point in metadata.entry_points(group=_ENTRY_POINTS)):
        return known
    from backquant.backend_config import get_backend_config, list_backends

    others = [name for name in list_backends() if name not in names]
    for name, config in ((name, get_backend_config(name)) for name in others):
        known.append(ListedBackend(name, config.engine, len(config.shared_configs)))
    return known


def published_schema() -> Any:
    """The JSON Schema of spec files: what ``json_schema()`` returns.

    >>> published_schema()["title"]
    'backquant backend description'
    """
    return json.loads((_ROOM / "files" / "schema_v1.json").read_text(encoding="utf-8"))


def artifact_schema() -> Any:
    """The JSON Schema of the manifests of saved models.

    >>> artifact_schema()["title"]
    'backquant artifact'
    """
    return json.loads((_PACKAGE / "artifact" / "schema_v2.json").read_text(encoding="utf-8"))


# Which engines run here, in a few words; remembered, because finding out takes importing torch.
#
# The memory is a file in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``), one for each
# build of torch on each kind of CPU. Without it, or where it cannot be written, torch is asked.

REFERENCE = "reference model"
_GROUP = "backquant.engines"
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def engine_here(engine: str | None) -> str:
    """What models of a backend with this engine run on, on this machine.

    >>> engine_here(None)
    'reference model'
    """
    if engine is None:
        return REFERENCE
    known = engines_here()
    return known[engine] if engine in known else _requested(engine)


def engines_here() -> dict[str, str]:
    """Every engine with whether it runs here: ``yes, <instruction set>`` or ``no: <reason>``.

    >>> engines_here().keys() >= {"fbgemm", "onednn", "qnnpack", "x86"}
    True
    """
    path = memory_file()
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(known, dict) and all(isinstance(text, str) for text in known.values()):
            return known
    except (OSError, ValueError):
        pass
    from backquant.lower.engine import list_engines

    found = {name: _requested(name) for name in list_engines()}
    _remember(path, found)
    return found


def _requested(engine: str) -> str:
    from backquant.errors import EngineError
    from backquant.lower.engine import engine_info

    try:
        return f"yes, {engine_info(engine).isa}"
    except EngineError as error:
        return f"no: {error.what}"


def memory_file() -> Path:
    """Where the answers for this machine and this build of torch are kept.

    >>> memory_file().parent.name
    'backquant'
    """
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = hashlib.sha256("\n".join(_facts()).encode()).hexdigest()[:16]
    return Path(folder) / "backquant" / f"engines-{key}.json"


def _facts() -> list[str]:
    """What the answers depend on, read without torch."""
    spec = find_spec("torch")
    home = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    version = home / "version.py"
    built = version.stat().st_mtime_ns if version.is_file() else 0
    limits = [os.environ.get(name, "") for name in _LIMITS]
    engines = sorted(f"{p.name} {p.value}" for p in metadata.entry_points(group=_GROUP))
    return [__version__, str(home), str(built), platform.machine(), _cpu(), *limits, *engines]


def _cpu() -> str:
    """Model and instruction sets of the first processor, where the system tells (Linux)."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            wanted = ("model name", "flags", "Features", "CPU part")
            found = []
            for line in lines:
                if not line.strip():
                    break
                if line.startswith(wanted):
                    found.append(line.strip())
            return "\n".join(found)
    except OSError:
        return platform.processor()


def _remember(path: Path, found: dict[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(found).encode())
    except OSError:
        pass  # a read-only home: torch is asked again next time
