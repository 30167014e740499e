"""The table of ``names.txt``: what every name of ``torch.ao`` is.

A section per module, with its path below ``torch.ao``. A line is a home and the names that live there:

1. a module of backquant; ``name=other`` where it is called otherwise there;
2. ``=`` and a constant, as JSON;
3. ``!`` and a group of ``left_out.py``: names that backquant does without.

``+`` before a name: ``import *`` does not bring it. Indented lines go on with the line before.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import NamedTuple

__all__ = ["Entry", "table"]


class Entry(NamedTuple):
    """What one name is: ``home`` as in the file, ``name`` as it is called there."""

    home: str
    name: str
    starred: bool


@functools.cache
def table() -> dict[str, dict[str, Entry]]:
    """The entries by module path and name.

    >>> table()["quantization.observer"]["MinMaxObserver"]
    Entry(home='backquant.observe', name='MinMaxObserver', starred=True)
    """
    modules: dict[str, dict[str, Entry]] = {}
    home = ""
    for line in files("backquant.ao").joinpath("names.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            modules[line.strip("[]")] = entries = {}
            continue
        words = line.split()
        if words and not line.startswith(" "):
            home = words.pop(0)
        for word in words:
            name, _, called = word.lstrip("+").partition("=")
            starred = not word.startswith(("+", "_"))
            entries[name] = Entry(home, called or name, starred)
    return modules
