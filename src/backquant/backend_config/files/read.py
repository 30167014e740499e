"""From a checked tree to a ``BackendConfig``: names resolved, inherited entries overridden.

An entry whose pattern the extended backend has overrides it field by field: fields that are not
written stay, ``null`` resets a field to its default, ``add_dtype_configs`` appends. The entry keeps
its place and, unless it sets a field that refers to it, the spelling of its pattern, which orders the
fuser's arguments and names the ports. Other entries are appended in file order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from backquant.backend_config.conditions import check_names
from backquant.backend_config.declared import declared
from backquant.backend_config.description import Description
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.files.located import Located, field_name
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
from backquant.backend_config.pattern import NormalPattern
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.backend_config.spelling import at_path, condition_at, is_condition, pattern_from
from backquant.errors import SpecError, did_you_mean, quoted

__all__ = ["Base", "build"]

Value = TypeVar("Value")

# Fields that refer to the spelling of the pattern: its order, its form, its names.
_RESPELL = frozenset({"fuser_method", "ports", "root_node_getter", "extra_inputs_getter"})
_SUBJECTS = ("pattern", "patterns", "operators")
_CONFIGS = ("dtype_configs", "add_dtype_configs")
_ENTRY = {field.name: field for field in declared(BackendPatternConfig)}


class Base:
    """What a file extends: a description, and where its entries are written, if known."""

    def __init__(
        self,
        config: Description,
        places: dict[NormalPattern, Written] | None = None,
        file: Located | None = None,
    ) -> None:
        self.config = config
        self.places = places or {}
        self.file = file

    def head(self, field: str) -> str:
        """Where a field of the file itself stands; empty where it has none of this name."""
        known = self.file is not None and field in self.file.data
        return self.file.place((field,)) if self.file is not None and known else ""


def build(tree: Located, resolver: Resolver, base: Base | None = None) -> Base:
    """The description that a structurally sound ``tree`` holds, with the places of its entries.

    Raises SpecFileError with all problems: names that do not resolve, unknown dtype configs, patterns
    that stand twice, removals of what is not there.
    """
    builder = _Builder(tree, resolver, base)
    result = builder.run()
    if builder.problems:
        raise SpecFileError(sorted(builder.problems, key=lambda problem: problem.line or 0))
    return result


@dataclass(frozen=True)
class _Fields:
    """One entry of the file: its place, those of its dtype configs and conditions, and the values of its
    fields, which are read once for all of its patterns."""

    start: Path
    values: dict[str, Any]
    configs: list[tuple[Located, Path]]
    conditions: list[Path]


class _Builder:
    """One file being built. Problems are collected, so that all are reported at once."""

    def __init__(self, tree: Located, resolver: Resolver, base: Base | None) -> None:
        self.tree = tree
        self.data: dict[str, Any] = tree.data
        self.resolver = resolver
        self.base = base
        self.problems: list[Problem] = []
        self.named: dict[str, DTypeConfig] = {}
        self.entries = dict(base.config.shared_entries) if base else {}
        self.places = dict(base.places) if base else {}
        # what names of operators need besides their own entries, where no other entry is for it
        self.needed: list[tuple[BackendPatternConfig, _Fields, Path]] = []

    def run(self) -> Base:
        for name, data in self.data.get("dtype_configs", {}).items():
            place: Path = ("dtype_configs", name)
            named = self.attempt(place, DTypeConfig.read, data, self.resolver)
            self.named[name] = named if named is not None else DTypeConfig()
        self.remove()
        for index, entry in enumerate(self.data.get("entries", [])):
            fields = self.fields(entry, ("entries", index))
            for data, path in self.patterns(entry, fields.start):
                if (made := self.attempt(path, self.of_pattern, data)) is not None:
                    self.entry(made, fields, path)
            for at, name in enumerate(entry.get("operators") or ()):
                self.described(name, fields, (*fields.start, "operators", at))
        for made, fields, path in self.needed:
            if made.normal_pattern not in self.entries:
                self.entry(made, fields, path)
        config = self.attempt(("name",), self.head) or Description()
        return Base(config.adopt(self.entries), self.places, self.tree)

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
        found = self.tree.problem(path, message, fix)
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
            self.problem(path, error.what, error.fix)
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

    def of_pattern(self, data: Any) -> BackendPatternConfig:
        """An entry of the pattern alone."""
        pattern, reversed_form = pattern_from(data, self.resolver)
        made = BackendPatternConfig()
        set_pattern = made._set_pattern_complex_format if reversed_form else made.set_pattern
        return set_pattern(pattern)

    def described(self, name: str, fields: _Fields, path: Path) -> None:
        """What the records say of an operator that an entry names, with the entry's dtype configs."""
        records, configs = operator_records(), fields.values.get("dtype_configs", [])
        bare = self.attempt(path, records.entries_of, [name], []) or ()
        if not all(self.conditions_fit(one, fields) for one in bare):
            return
        made = self.attempt(path, records.entries_of, [name], configs) or ()
        needed = {row.normal_pattern for row in records.folding_entries(name)} if made else ()
        for one in made:
            own = {"dtype_configs": one.dtype_configs} if "dtype_configs" in fields.values else {}
            its = replace(fields, values=fields.values | own)
            if one.normal_pattern in needed:
                self.needed.append((one, its, path))
            else:
                self.entry(one, its, path)

    def remove(self) -> None:
        for index, data in enumerate(self.data.get("remove", [])):
            path: Path = ("remove", index)
            found = self.attempt(path, self.of_pattern, data)
            if found is None:
                continue
            pattern = found.normal_pattern
            if self.base is None:
                what = "a file without extends has nothing to remove"
                self.problem(path, what, "extends: <name>")
            elif pattern in self.entries:
                del self.entries[pattern]
                self.places.pop(pattern, None)
            else:
                what = f"the extended backend has no entry {pattern}"
                self.problem(path, what, did_you_mean(pattern, self.entries, quote=str))

    # -- entries ---------------------------------------------------------------------------------

    def fields(self, data: dict[str, Any], start: Path) -> _Fields:
        """The values of an entry, and where it says what depends on its pattern."""
        fields = _Fields(start, {}, [], [])
        named = self.data.get("dtype_configs", {})
        if is_condition(data.get("where")):
            fields.conditions.append((*start, "where"))
        for name in _CONFIGS:
            for index, item in enumerate(data.get(name) or ()):
                is_name = isinstance(item, str)
                path: Path = ("dtype_configs", item) if is_name else (*start, name, index)
                fields.configs.append((self.tree, path))
                if is_condition((named.get(item, {}) if is_name else item).get("where")):
                    fields.conditions.append((*path, "where"))
        for name, item in data.items():
            if name not in _SUBJECTS:
                self.attempt((*start, name), self.read_field, fields.values, name, item)
        return fields

    def read_field(self, values: dict[str, Any], name: str, data: Any) -> None:
        field = _ENTRY.get(name)
        if field is None or name == "dtype_configs":
            given = enumerate(data or ())
            values[name] = [at_path((at,), self.dtype_config_at, item) for at, item in given]
        elif data is None:
            values[name] = None if field.kind.of_pattern else copy(field.default)
        else:
            value = field.kind.read(data, self.resolver)
            values[name] = value if field.kind.of_pattern else field.kind.check(value, name)

    def entry(self, made: BackendPatternConfig, fields: _Fields, path: Path) -> None:
        """Add ``made``, or what is inherited for its pattern, with the fields of an entry of the file."""
        normal, values = made.normal_pattern, fields.values
        known, inherited = self.places.get(normal), self.entries.get(normal)
        if known is not None and known.tree is self.tree:
            line = self.tree.line_of(known.pattern)
            message = f"the pattern {normal} stands twice (first on line {line})"
            self.problem(path, message, "merge the two entries")
            return
        config = made if inherited is None else inherited.copy()
        if config is not made and not _RESPELL.isdisjoint(values):
            config.set_ports({}).set_pattern(None)
            config._set_pattern_complex_format(made._pattern_complex_format)
            config.set_pattern(made.pattern)
        for name, value in values.items():
            if name == "add_dtype_configs":
                config.dtype_configs = [*config.dtype_configs, *value]
            elif _ENTRY[name].kind.of_pattern:
                self.attempt((*fields.start, name), config.set_field, name, value)
            else:
                setattr(config, _ENTRY[name].attribute, value)
        if fields.conditions:
            self.conditions_fit(config, fields)
        self.entries[normal] = config
        kept: tuple[Any, ...] = ()
        if inherited is not None and "dtype_configs" not in values:
            kept = known.configs if known else (None,) * len(inherited.dtype_configs)
        self.places[normal] = Written(self.tree, path, (*kept, *fields.configs))

    def conditions_fit(self, config: BackendPatternConfig, fields: _Fields) -> bool:
        """Whether conditions name what the pattern has; where one does not, the problem is noted."""
        accept = partial(check_names, entry=config)
        read = [self.attempt(p, condition_at, self.tree.at(p), accept) for p in fields.conditions]
        return None not in read

    def dtype_config_at(self, reference: Any) -> DTypeConfig:
        if not isinstance(reference, str):
            return DTypeConfig.read(reference, self.resolver)
        if reference not in self.named:
            raise SpellingError(
                f"no dtype config is called {quoted(reference)} in this file",
                suggestion(reference, self.named),
            )
        return self.named[reference]


# Where the parts of a description are written: file, line and field of what a finding is about.

_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


@dataclass(frozen=True)
class Written:
    """Where an entry is written: its pattern, and its dtype configs (``None``: in no file)."""

    tree: Located
    pattern: Path
    configs: tuple[tuple[Located, Path] | None, ...]

    def place(self, field: str) -> str:
        """Where ``field``, as a finding names it, is written.

        What the entry leaves out, or inherits from no file, is said of the place of its pattern.
        """
        path: Path = tuple(int(item) if item else name for item, name in _PART.findall(field))
        if path[:1] == ("dtype_configs",) and len(path) > 1:
            config = self.configs[int(path[1])]
            if config is not None:
                tree, start = config
                return tree.place(tree.known_path((*start, *path[2:])))
        entry = self.pattern[:2]
        if path and path[0] in self.tree.at(entry):
            return self.tree.place(self.tree.known_path((*entry, *path)))
        line = self.tree.line_of(self.pattern)
        return f"{self.tree.file}:{line}: {field_name((*entry, *path))}"
