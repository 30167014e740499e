"""What is known about descriptions without importing one, and with it torch: generated files of this
package (``tools/generate_backend_docs.py`` writes them, CI compares them)."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOM = _PACKAGE / "backend_config"
_GROUP = "backquant.backends"


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
    if all(point.name in names for point in metadata.entry_points(group=_GROUP)):
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
