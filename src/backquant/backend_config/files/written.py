"""Where the parts of a description are written: file, line and field of what a finding is about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backquant.backend_config.conditions import condition_from, quantities_of
from backquant.backend_config.files.located import Located, Path, field_name, plain
from backquant.errors import SpecError

_CONFIGS = ("dtype_configs", "add_dtype_configs")
_OF_CONFIG = re.compile(r"dtype_configs\[\d+\]\.(.+)")
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


@dataclass(frozen=True)
class Spot:
    """One value of a file, by the path to it.

    >>> tree = Located({"name": Located("x", 2)}, 1, {"name": 2})
    >>> Spot("x.yaml", tree, ("name",)).place()
    'x.yaml:2: name'
    """

    file: str
    tree: Located
    path: Path

    @property
    def line(self) -> int:
        """The line of the value, or of its key; of one that is left out, of what it is missing in."""
        left_out = self.path and str(self.path[-1]) not in _keys(self.path[:-1], self.tree)
        at = self.path[:-1] if left_out and isinstance(self.path[-1], str) else self.path
        return self.tree.line_of(at)

    def at(self, below: Path) -> Spot:
        """A value below this one, as deep as the file goes."""
        return Spot(self.file, self.tree, self.tree.known_path((*self.path, *below)))

    def place(self) -> str:
        """``file:line: field``."""
        return f"{self.file}:{self.line}: {field_name(self.path)}"


@dataclass(frozen=True)
class Written:
    """Where an entry is written: its pattern, and its dtype configs (``None``: in no file)."""

    pattern: Spot
    configs: tuple[Spot | None, ...]

    def place(self, field: str) -> str:
        """Where ``field``, as a finding names it, is written.

        What the entry leaves out, or inherits from no file, is said of the place of its pattern.
        """
        path = tuple(int(item) if item else name for item, name in _PART.findall(field))
        if path[:1] == ("dtype_configs",) and len(path) > 1:
            config = self.configs[int(path[1])]
            if config is not None:
                return config.at(path[2:]).place()
        entry = Spot(self.pattern.file, self.pattern.tree, self.pattern.path[:2])
        if path and path[0] in _keys(entry.path, entry.tree):
            return entry.at(path).place()
        at = field_name((*entry.path, *path))
        return f"{self.pattern.file}:{self.pattern.line}: {at}"


def _keys(path: Path, tree: Located) -> Any:
    value = tree.at(path).value
    return value if isinstance(value, dict) else ()


def config_paths(tree: Located, entry: Path) -> list[Path]:
    """The paths to the dtype configs of an entry: to the named one, or to that in place.

    >>> text = Located([Located("int8", 4), Located({}, 5)], 4)
    >>> tree = Located({"entries": Located([Located({"dtype_configs": text}, 3)], 3)}, 1)
    >>> config_paths(tree, ("entries", 0))
    [('dtype_configs', 'int8'), ('entries', 0, 'dtype_configs', 1)]
    """
    found: list[Path] = []
    given = tree.at(entry).value
    for field in _CONFIGS:
        items = given[field].value if field in given else None
        for index, item in enumerate(items or ()):
            named = isinstance(item.value, str)
            found.append(("dtype_configs", item.value) if named else (*entry, field, index))
    return found


def named_in_configs(tree: Located, path: Path, where: str) -> Path | None:
    """Where a condition of a dtype config, of the entry that ``path`` leads into, names the quantity that
    an error is about: ``where`` is ``dtype_configs[0].stride``."""
    found = _OF_CONFIG.fullmatch(where)
    if path[:1] != ("entries",) or len(path) < 2 or found is None:
        return None
    quantity = found[1]
    for config in config_paths(tree, path[:2]):
        value = plain(tree.at(config))
        condition = value.get("where") if isinstance(value, dict) else None
        inside = next(_naming(condition, quantity), None)
        if inside is not None:
            return (*config, "where", *inside)
    return None


def _naming(data: Any, quantity: str) -> Iterator[Path]:
    """The paths to the keys of a condition's mapping that name ``quantity``."""
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        if key in ("all", "any") and isinstance(value, list):
            inside = enumerate(value)
            yield from ((key, at, *path) for at, each in inside for path in _naming(each, quantity))
        elif key == "not":
            yield from ((key, *path) for path in _naming(value, quantity))
        elif _names(key, value, quantity):
            yield (key,)


def _names(key: str, value: Any, quantity: str) -> bool:
    try:
        return any(str(each) == quantity for each in quantities_of(condition_from({key: value})))
    except SpecError:
        return False
