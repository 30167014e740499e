"""Spec files: a backend description as YAML or JSON, with a published schema.

>>> from backquant.backend_config import BackendConfig
>>> loads(dumps(BackendConfig("mine"))) == BackendConfig("mine")
True
"""

from __future__ import annotations

from backquant.backend_config.config import BackendConfig
from backquant.backend_config.files.check import json_schema
from backquant.backend_config.files.findings import check_file, findings_in
from backquant.backend_config.files.store import (
    Format,
    dumps,
    load_with_places,
    read_text,
    save_file,
)
from backquant.backend_config.import_paths import Problem, SpecFileError

__all__ = [
    "Problem",
    "SpecFileError",
    "check_file",
    "dumps",
    "findings_in",
    "json_schema",
    "load_with_places",
    "loads",
    "save_file",
]


def loads(
    text: str, format: Format = "yaml", *, file: str = "<text>", allow: tuple[str, ...] = ()
) -> BackendConfig:
    """The description in ``text``. ``file`` names it in errors; ``allow`` widens what may be imported.

    Raises ``SpecError`` (SpecFileError).

    >>> loads("{schema_version: 1, name: mine}").name
    'mine'
    """
    return BackendConfig.of(read_text(text, format, file=file, allow=allow).config)
