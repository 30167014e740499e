"""Where the files of a package lie that is not imported: weights and data are enough."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def folder_of(package: str, module: str) -> Path:
    """The folder of ``module``. Raises ``ModuleNotFoundError`` with what to install."""
    found = find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"pip install --no-deps {package}")
    return Path(next(iter(found.submodule_search_locations)))
