"""From a checked tree to a ``BackendConfig``: names resolved, inherited entries overridden.

An entry whose pattern the extended backend has overrides it field by field: fields that are not
written stay, ``null`` resets a field to its default, ``add_dtype_configs`` appends. The entry keeps
its place and, unless it sets a field that refers to it, the spelling of its pattern, which orders the
fuser's arguments and names the ports. Other entries are appended in file order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from backquant.backend_config.conditions import check_names, condition_from, quantities_of
from backquant.backend_config.declared import declared
from backquant.backend_config.description import Description
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.files.located import Located, field_name, plain
from backquant.backend_config.import_paths import (
    MOST_TOLD,
    Problem,
    Resolver,
    SpecFileError,
    SpellingError,
    suggestion,
)
from backquant.backend_config.layout import Path
from backquant.backend_config.naming import operator_records
from backquant.backend_config.pattern import NormalPattern, from_reversed, normal_form
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.backend_config.spelling import at_path, condition_at, pattern_data, pattern_from
from backquant.errors import SpecError, did_you_mean, quoted

__all__ = ["Base", "build"]

Value = TypeVar("Value")

# Fields that refer to the spelling of the pattern: its order, its form, its names.
_RESPELL = frozenset({"fuser_method", "ports", "root_node_getter", "extra_inputs_getter"})
_SUBJECTS = ("pattern", "patterns", "operators")
_OF_RECORDS = (*_SUBJECTS, "dtype_configs")
_ENTRY = {field.name: field for field in declared(BackendPatternConfig)}


class Base:
    """What a file extends: a description, and where its entries are written, if known."""

    def __init__(
        self,
        config: Description,
        places: dict[NormalPattern, Written] | None = None,
        file: Spot | None = None,
    ) -> None:
        self.config = config
        self.places = places or {}
        self.file = file

    def head(self, field: str) -> str:
        """Where a field of the file itself stands; empty where it has none of this name."""
        known = self.file is not None and field in self.file.tree.key_lines
        return self.file.at((field,)).place() if self.file is not None and known else ""


def build(tree: Located, file: str, resolver: Resolver, base: Base | None = None) -> Base:
    """The description that a structurally sound ``tree`` holds, with the places of its entries.

    Raises SpecFileError with all problems: names that do not resolve, unknown dtype configs, patterns
    that stand twice, removals of what is not there.
    """
    builder = _Builder(tree, file, resolver, base)
    result = builder.run()
    if builder.problems:
        raise SpecFileError(sorted(builder.problems, key=lambda problem: problem.line or 0))
    return result


class _Builder:
    """One file being built. Problems are collected, so that all are reported at once."""

    def __init__(self, tree: Located, file: str, resolver: Resolver, base: Base | None) -> None:
        self.tree = tree
        self.data: dict[str, Any] = plain(tree)
        self.file = file
        self.resolver = resolver
        self.base = base
        self.problems: list[Problem] = []
        self.named: dict[str, DTypeConfig] = {}
        self.entries: dict[NormalPattern, BackendPatternConfig] = {}
        self.places: dict[NormalPattern, Written] = {}
        # what names of operators need besides their own entries, where no other entry is for it
        self.needed: list[tuple[BackendPatternConfig, dict[str, Any], Path]] = []

    def run(self) -> Base:
        if self.base is not None:
            base = self.base.config.shared_entries
            self.entries = {pattern: entry.copy() for pattern, entry in base.items()}
            self.places = dict(self.base.places)
        for name, data in self.data.get("dtype_configs", {}).items():
            place: Path = ("dtype_configs", name)
            named = self.attempt(place, DTypeConfig.read, data, self.resolver)
            self.named[name] = named if named is not None else DTypeConfig()
        self.remove()
        seen: dict[NormalPattern, Path] = {}
        for index, entry in enumerate(self.data.get("entries", [])):
            start = ("entries", index)
            for pattern, path in self.patterns(entry, start):
                self.entry(pattern, entry, path, seen)
            for made, path in self.described(entry, start):
                self.entry(pattern_data(made.pattern), entry, path, seen, made)
        for made, entry, path in self.needed:
            if made.normal_pattern not in self.entries:
                self.entry(pattern_data(made.pattern), entry, path, seen, made)
        config = self.attempt(("name",), self.head)
        for entry in self.entries.values():
            if config is not None:
                config.set_backend_pattern_config(entry)
        return Base(config or Description(), self.places, Spot(self.file, self.tree, ()))

    def head(self) -> Description:
        """The fields of the backend itself: those of the file, else those that it inherits."""
        config = Description(self.data["name"])
        inherited = self.base.config if self.base else config
        for field in declared(Description):
            if field.name == "name":
                continue
            value = getattr(inherited, field.name)
            if field.name in self.data:
                data = self.data[field.name]
                place = (field.name,)
                value = data and self.attempt(place, field.kind.read, data, self.resolver)
            config.set_field(field.name, value)
        return config

    def problem(self, path: Path, message: str, fix: str = "") -> None:
        place = self.tree.known_path(path)
        found = Problem(self.file, self.tree.line_of(place), field_name(place), message, fix)
        same = (found.line, found.field, fix)
        if fix and any((other.line, other.field, other.fix) == same for other in self.problems):
            return  # what is said of one spelling of an operator is not repeated for the others
        self.problems.append(found)
        if len(self.problems) >= MOST_TOLD:
            raise SpecFileError(self.problems)

    def attempt(self, path: Path, make: Callable[..., Value], *arguments: Any) -> Value | None:
        """``make(*arguments)``, or None with the problem noted at ``path``."""
        try:
            return make(*arguments)
        except SpellingError as problem:
            self.problem((*path, *problem.path), problem.what, problem.fix)
        except SpecError as error:
            named = named_in_configs(self.tree, path, error.where)
            self.problem(named or path, error.what, error.fix)
        return None

    # -- patterns --------------------------------------------------------------------------------

    def patterns(self, entry: dict[str, Any], path: Path) -> list[tuple[Any, Path]]:
        """The patterns of an entry of the file, each with its path."""
        given = [field for field in _SUBJECTS if entry.get(field) is not None]
        if len(given) != 1:
            which = f"has both {' and '.join(given)}" if given else "has no pattern"
            self.problem(path, f"an entry {which}", f"write one of {', '.join(_SUBJECTS)}")
            return []
        single, several = entry.get("pattern"), entry.get("patterns", ())
        if single is not None:
            return [(single, (*path, "pattern"))]
        return [(item, (*path, "patterns", index)) for index, item in enumerate(several)]

    def described(
        self, entry: dict[str, Any], path: Path
    ) -> list[tuple[BackendPatternConfig, Path]]:
        """What the records say of the operators that an entry names; dtype configs are in place."""
        found: list[tuple[BackendPatternConfig, Path]] = []
        names = entry.get("operators") or ()
        configs: list[DTypeConfig] = []
        if names and entry.get("dtype_configs"):
            read = self.attempt((*path, "dtype_configs"), self.dtype_configs_at, entry)
            configs = read or []
        for index, name in enumerate(names):
            place: Path = (*path, "operators", index)
            made = self.attempt(place, operator_records().entries_of, [name], configs)
            folding = operator_records().folding_entries(name) if made else ()
            needed = {row.normal_pattern for row in folding}
            for one in made or ():
                if one.normal_pattern in needed:
                    self.needed.append((one, entry, place))
                else:
                    found.append((one, place))
        return found

    def dtype_configs_at(self, entry: dict[str, Any]) -> list[DTypeConfig]:
        given = enumerate(entry["dtype_configs"])
        return [at_path((index,), self.dtype_config_at, item) for index, item in given]

    def resolve(self, data: Any, path: Path) -> tuple[Any, bool, NormalPattern] | None:
        def make() -> tuple[Any, bool, NormalPattern]:
            pattern, reversed_form = pattern_from(data, self.resolver)
            normal = from_reversed(pattern) if reversed_form else normal_form(pattern)
            return pattern, reversed_form, normal

        return self.attempt(path, make)

    def remove(self) -> None:
        for index, data in enumerate(self.data.get("remove", [])):
            path: Path = ("remove", index)
            found = self.resolve(data, path)
            if found is None:
                continue
            if self.base is None:
                self.problem(
                    path, "a file without extends has nothing to remove", "extends: <name>"
                )
            elif found[2] in self.entries:
                del self.entries[found[2]]
                self.places.pop(found[2], None)
            else:
                self.problem(
                    path,
                    f"the extended backend has no entry {found[2]}",
                    did_you_mean(found[2], self.entries, quote=str),
                )

    # -- entries ---------------------------------------------------------------------------------

    def entry(
        self,
        pattern: Any,
        data: dict[str, Any],
        path: Path,
        seen: dict[NormalPattern, Path],
        described: BackendPatternConfig | None = None,
    ) -> None:
        found = self.resolve(pattern, path)
        if found is None:
            return
        spelled, reversed_form, normal = found
        if normal in seen:
            line = self.tree.line_of(self.tree.known_path(seen[normal]))
            message = f"the pattern {normal} stands twice (first on line {line})"
            self.problem(path, message, "merge the two entries")
            return
        seen[normal] = path
        inherited = self.entries.get(normal)
        config = inherited if inherited is not None else described or BackendPatternConfig()
        if described is not None and "dtype_configs" in data:
            config.set_dtype_configs(described.dtype_configs)
        if (inherited is None and described is None) or not _RESPELL.isdisjoint(data):
            config.set_ports({})
            config.set_pattern(None)._set_pattern_complex_format(None)
            set_pattern = (
                config._set_pattern_complex_format if reversed_form else config.set_pattern
            )
            set_pattern(spelled)
        start = path[:2]
        for field, value in data.items():
            if field not in (_SUBJECTS if described is None else _OF_RECORDS):
                self.attempt((*start, field), self.set_field, config, field, value)
        self.entries[normal] = config
        known = self.places.get(normal)
        inherits = inherited is not None and "dtype_configs" not in data
        kept = (
            known.configs if known else (None,) * len(inherited.dtype_configs if inherited else ())
        )
        spots = [Spot(self.file, self.tree, at) for at in config_paths(self.tree, start)]
        pattern_spot = Spot(self.file, self.tree, path)
        self.places[normal] = Written(pattern_spot, (*(kept if inherits else ()), *spots))

    def set_field(self, config: BackendPatternConfig, field: str, value: Any) -> None:
        if field in ("dtype_configs", "add_dtype_configs"):
            configs = [
                at_path((index,), self.dtype_config_at, item)
                for index, item in enumerate(value or [])
            ]
            kept = config.dtype_configs if field == "add_dtype_configs" else []
            config.set_dtype_configs([*kept, *configs])
        elif field == "where":
            config.set_where(condition_at(value, lambda where: check_names(where, config)))
        elif value is None:
            config.set_field(field, None)
        else:
            config.set_field(field, _ENTRY[field].kind.read(value, self.resolver))

    def dtype_config_at(self, reference: Any) -> DTypeConfig:
        if not isinstance(reference, str):
            return DTypeConfig.read(reference, self.resolver)
        if reference not in self.named:
            raise SpellingError(
                f"no dtype config is called {quoted(reference)} in this file",
                suggestion(reference, self.named),
            )
        return self.named[reference].copy()


# Where the parts of a description are written: file, line and field of what a finding is about.

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
