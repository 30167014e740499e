"""Faces of packages that import a module when one of its names is first asked for.

The ``__init__.pyi`` beside the ``__init__.py`` lists the names and who has them, for type checkers, too.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

_LISTED = r"(?m)^from (backquant[\w.]*) import \(?\s*(\w+) as \2\b"


@cache
def listed(file: str) -> dict[str, str]:
    """The package or module of every name that the ``__init__.pyi`` beside ``file`` lists.

    >>> import backquant
    >>> listed(backquant.__file__)["quantize"]
    'backquant.api'
    """
    text = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    return {name: room for room, name in re.findall(_LISTED, text)}


def member(package: str, file: str, name: str) -> Any:
    """What ``name`` stands for in a package, or its module of this name. Raises ``AttributeError``.

    >>> import backquant
    >>> member("backquant", backquant.__file__, "QConfig").__name__
    'QConfig'
    """
    room = package if name.startswith("_") else listed(file).get(name, package)
    if room != package:
        return getattr(importlib.import_module(room), name)
    try:
        return importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{name}":
            raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
