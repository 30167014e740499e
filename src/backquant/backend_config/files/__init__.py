"""Spec files: a backend description as YAML or JSON, with a published schema.

>>> from backquant.backend_config import BackendConfig
>>> loads(dumps(BackendConfig("mine"))) == BackendConfig("mine")
True
"""

from __future__ import annotations

from backquant.backend_config.files.findings import check_file
from backquant.backend_config.files.problems import Problem, SpecFileError
from backquant.backend_config.files.schema import json_schema
from backquant.backend_config.files.store import (
    dumps,
    load_file,
    load_with_places,
    loads,
    save_file,
)

__all__ = [
    "Problem",
    "SpecFileError",
    "check_file",
    "dumps",
    "json_schema",
    "load_file",
    "load_with_places",
    "loads",
    "save_file",
]
