"""Saving and loading spec files. Writing is atomic; ``extends`` is followed here."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import yaml

from backquant.backend_config.declared import set_fields
from backquant.backend_config.description import Description
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints
from backquant.backend_config.files.check import (
    SCHEMA_VERSION,
    structure_problems,
    take_current_names,
)
from backquant.backend_config.files.located import Located, read_json, read_yaml
from backquant.backend_config.files.read import Base, build
from backquant.backend_config.import_paths import Resolver, SpecFileError, SpellingError
from backquant.backend_config.installed import installed_backend, is_spec_file
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.backend_config.spelling import pattern_data
from backquant.dtypes import dtype_name, integer_range
from backquant.errors import BackquantError, SpecError, literal
from backquant.files import replace_file

# A backend description as plain data: strings, numbers, lists and dicts in the layout of ``models``.
#
# Equal dtype configs get one name, and the entries refer to it. Consecutive entries that differ in
# their pattern only are written as one entry with ``patterns``.


def to_data(config: Description) -> dict[str, Any]:
    """The content of a spec file for ``config``.

    Raises ``SpecError`` naming the entry and the field that holds something without an import path
    (a lambda, a closure), or a number that is not finite.

    >>> import torch
    >>> from backquant.backend_config import DTypeConfig
    >>> static = DTypeConfig(torch.quint8, torch.quint8)
    >>> entry = BackendPatternConfig(torch.add).add_dtype_config(static)
    >>> to_data(Description("mine").set_backend_pattern_config(entry))["entries"]
    [{'pattern': 'torch.add', 'dtype_configs': ['quint8']}]
    """
    names = _Names()
    entries: list[dict[str, Any]] = []
    for index, entry in enumerate(config.shared_configs):
        place = f"configs[{index}] {entry.normal_pattern}"
        entries.append(_entry(entry, names, place))
    data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "name": config.name}
    for field, value in set_fields(config):
        data[field.name] = _named(lambda f=field, v=value: f.kind.write(v), field.name)  # type: ignore[misc]
    if names.by_name:
        data["dtype_configs"] = names.by_name
    data["entries"] = _grouped(entries)
    return data


class _Names:
    """Names for dtype configs, in order of first use."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, Any]] = {}
        self._by_content: dict[str, str] = {}

    def name(self, config: DTypeConfig) -> str:
        data = config.written()
        content = json.dumps(data)
        if content not in self._by_content:
            base = name = _descriptive_name(config)
            number = 2
            while name in self.by_name:
                name = f"{base}_{number}"
                number += 1
            self.by_name[name] = data
            self._by_content[content] = name
        return self._by_content[content]


def _descriptive_name(config: DTypeConfig) -> str:
    """Such as ``quint8``, ``quint8_weight_qint8``, ``dynamic_quint8_weight_qint8``."""
    words = ["dynamic"] if config.is_dynamic else []
    if config.input_dtype is not None:
        words.append(dtype_name(config.input_dtype))
    differs = config.output_dtype not in (config.input_dtype, None)
    if config.output_dtype is not None and differs and not config.is_dynamic:
        words += ["to", dtype_name(config.output_dtype)]
    if config.weight_dtype is not None:
        words += ["weight", dtype_name(config.weight_dtype)]
    return "_".join([*words, *_fixed_range(config.output_dtype_with_constraints)]) or "any"


def _fixed_range(given: DTypeWithConstraints) -> list[str]:
    """``from_-1_to_1`` for fixed qparams: the real range that a byte covers with them."""
    scale, zero_point = given.scale_exact_match, given.zero_point_exact_match
    limits = integer_range(given.dtype)
    if scale is None or zero_point is None or limits is None:
        return []
    low, high = ((bound - zero_point) * scale for bound in (limits[0], limits[1] + 1))
    return ["from", f"{low:g}", "to", f"{high:g}"]


def _entry(entry: BackendPatternConfig, names: _Names, place: str) -> dict[str, Any]:
    reversed_form = entry.pattern is None
    pattern = entry._pattern_complex_format if reversed_form else entry.pattern
    data: dict[str, Any] = {
        "pattern": _named(lambda: pattern_data(pattern, reversed_form), f"{place}: pattern")
    }
    for field, value in set_fields(entry):
        at = f"{place}: {field.name}"
        if field.name == "dtype_configs":
            data[field.name] = [
                _named(lambda c=config: names.name(c), f"{at}[{index}]")  # type: ignore[misc]
                for index, config in enumerate(value)
            ]
        elif field.name not in ("pattern", "pattern_complex_format"):
            data[field.name] = _named(lambda f=field, v=value: f.kind.write(v), at)  # type: ignore[misc]
    return data


def _named(make: Callable[[], Any], place: str) -> Any:
    try:
        return make()
    except SpellingError as problem:
        raise SpecError(
            f"cannot be stored: {problem.what}", where=place, fix=problem.fix
        ) from problem


def _grouped(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of entries that differ in their pattern only, as one entry with ``patterns``."""
    groups: list[tuple[dict[str, Any], list[Any]]] = []
    for entry in entries:
        pattern = entry.pop("pattern")
        if groups and groups[-1][0] == entry and list(groups[-1][0]) == list(entry):
            groups[-1][1].append(pattern)
        else:
            groups.append((entry, [pattern]))
    return [
        {"pattern": patterns[0], **fields}
        if len(patterns) == 1
        else {"patterns": patterns, **fields}
        for fields, patterns in groups
    ]


_MOST = 1 << 20  # 30 times the largest that comes with backquant
Format = Literal["yaml", "json"]
_FORMATS: dict[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def dumps(config: Description, format: Format = "yaml") -> str:
    """The text of a spec file. Raises ``SpecError`` naming what has no import path.

    >>> print(dumps(Description("mine").set_engine("x86")), end="")
    schema_version: 1
    name: mine
    engine: x86
    entries: []
    """
    data = to_data(config)
    return emit_json(data) if _known(format) == "json" else emit_yaml(data)


def read_text(
    text: str, format: Format = "yaml", *, file: str = "<text>", allow: tuple[str, ...] = ()
) -> Base:
    """The description in ``text``. ``file`` names it in errors; ``allow`` widens what may be imported.

    An ``extends`` with a file is relative to the working directory. Raises ``SpecError`` (SpecFileError).

    >>> read_text("{schema_version: 1, name: mine}").config.name
    'mine'
    """
    source = _Source(file, Path.cwd(), _known(format))
    return _load(text, source, Resolver(allow), ())


def save_file(config: Description, path: str | os.PathLike[str]) -> None:
    """Write ``config`` as YAML (.yaml, .yml) or JSON (.json), by the suffix of ``path``.

    A temporary file in the same folder is renamed at the end: there is never a half-written file.
    Raises ``SpecError`` for another suffix, what cannot be stored, or a folder that cannot be
    written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file(Description("mine"), Path(folder) / "mine.json")
    ...     load_with_places(Path(folder) / "mine.json").config.name
    'mine'
    """
    target = Path(path)
    text = dumps(config, _format_of(target))
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SpecError(f"cannot be stored as UTF-8: {error}", where=str(target)) from error
    try:
        replace_file(target, content)
    except OSError as error:
        raise SpecError(f"cannot be written: {error.strerror}", where=str(target)) from error


def load_with_places(path: str | os.PathLike[str], allow: tuple[str, ...] = ()) -> Base:
    """The spec file at ``path``, with the file and line of every entry that came from a file.

    ``allow``: packages, beyond torch and backquant, to import from. Raises ``SpecError`` (SpecFileError, with
    file, line and field of everything that is wrong).
    """
    return _load_path(Path(path), Resolver(allow), ())


class _Source(NamedTuple):
    """Where text came from: its name in messages, the folder of relative files, its format."""

    name: str
    folder: Path
    format: Format


def _load_path(path: Path, resolver: Resolver, chain: tuple[Path, ...]) -> Base:
    format = _format_of(path)
    try:
        text = _read(path).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise SpecError("no such file", where=str(path), fix=_other_files(path)) from error
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"is not UTF-8: {error}", where=str(path)) from error
    source = _Source(str(path), path.parent, format)
    return _load(text, source, resolver, (*chain, path.resolve()))


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise SpecError("cannot be read: it is no regular file", where=str(path))
    with path.open("rb") as stream:
        return stream.read(_MOST + 1)


def _load(text: str, source: _Source, resolver: Resolver, chain: tuple[Path, ...]) -> Base:
    if len(text) > _MOST:
        raise SpecError(
            f"a description has at most {_MOST:,} characters",
            where=source.name,
            fix="extends: the description that the rest of this one repeats",
        )
    read = read_json if source.format == "json" else read_yaml
    tree = read(text, source.name)
    problems = structure_problems(tree)
    if problems:
        raise SpecFileError(problems)
    take_current_names(tree)
    base = _base(tree, source, resolver, chain)
    try:
        return build(tree, resolver, base)
    except RecursionError:
        raise SpecError("a pattern is too long", where=source.name) from None


def _base(
    tree: Located, source: _Source, resolver: Resolver, chain: tuple[Path, ...]
) -> Base | None:
    """What the file extends: a file when the value looks like one, else a backend's name."""
    extends: str | None = tree.data.get("extends")
    if extends is None:
        return None
    if not is_spec_file(extends):
        try:
            return Base(installed_backend(extends))
        except BackquantError as error:
            raise tree.fail(("extends",), error.what, error.fix) from error
    path = source.folder / extends
    _check_folder(path, source, resolver, tree)
    if path.resolve() in chain:
        names = " → ".join(item.name for item in (*chain, path.resolve()))
        raise tree.fail(("extends",), f"a file extends itself: {names}", "remove one extends")
    try:
        return _load_path(path, resolver, chain)
    except SpecFileError:
        raise
    except SpecError as error:
        raise tree.fail(("extends",), f"{extends}: {error.what}", error.fix) from error


def _check_folder(path: Path, source: _Source, resolver: Resolver, tree: Located) -> None:
    """A file extends files of its own folder, and of those that the caller allows."""
    here = (source.folder.resolve(), *resolver.folders)
    try:
        place = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no name of a file
        raise tree.fail(("extends",), f"this is no place of a file: {error}") from error
    if not any(place.is_relative_to(folder) for folder in here):
        message = "this file lies outside of the folder of the description"
        allowed = f"allow=({literal(path.parent)},)"
        fix = f"if you trust it, allow its folder where the file is loaded: {allowed}"
        raise tree.fail(("extends",), message, fix)


def _format_of(path: Path) -> Format:
    format = _FORMATS.get(path.suffix.lower())
    if format is None:
        raise SpecError(
            f"a spec file ends in .yaml, .yml or .json, not in {path.suffix or 'nothing'!r}",
            where=str(path),
            fix=f'"{path.with_suffix(".yaml")}"' if path.name else "",
        )
    return format


def _known(format: Format) -> Format:
    if format not in ("yaml", "json"):
        raise SpecError(f"unknown format {format!r}", where="format", fix='"yaml" or "json"')
    return format


def _other_files(path: Path) -> str:
    """The spec files beside a missing one."""
    with contextlib.suppress(OSError):
        names = sorted(item.name for item in path.parent.iterdir() if item.suffix in _FORMATS)
        if names:
            return f"files there: {', '.join(names[:5])}"
    return ""


# Plain data as YAML or JSON text: short collections on one line, long ones over several.
WIDTH = 100
_BLOCK_DEPTH = 2  # the file, its sections, and their items are written over several lines
_SHORT = 84


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes what YAML 1.2 (and ``yaml_reader``) would take for a number."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def emit_yaml(data: dict[str, Any]) -> str:
    """YAML text that ``read_yaml`` turns into the same data.

    >>> print(emit_yaml({"name": "mine", "entries": [{"pattern": ["torch.add", ".relu"]}]}))
    name: mine
    entries:
    - pattern: [torch.add, .relu]
    <BLANKLINE>
    """
    text: str = yaml.serialize(_node(data, 0), Dumper=_Dumper, width=WIDTH, allow_unicode=True)
    return text


def _node(value: Any, depth: int) -> yaml.Node:
    if isinstance(value, dict):
        pairs = [(_node(key, depth + 1), _node(item, depth + 1)) for key, item in value.items()]
        flow = _flow(value, depth)
        return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=flow)
    if isinstance(value, list):
        items = [_node(item, depth + 1) for item in value]
        return yaml.SequenceNode("tag:yaml.org,2002:seq", items, flow_style=_flow(value, depth))
    scalar: yaml.ScalarNode = cast("Any", _Dumper(_Sink())).represent_data(value)
    if isinstance(value, str) and not value.isprintable():
        scalar.style = '"'  # with escapes: the other styles lose some line breaks
    return scalar


def _flow(value: Any, depth: int) -> bool:
    return not value or (depth > _BLOCK_DEPTH and len(json.dumps(value)) <= _SHORT)


class _Sink:
    """A stream that nobody reads: a Dumper wants one even for a single node."""

    def write(self, text: str) -> None:
        """Drop ``text``."""


def emit_json(data: dict[str, Any]) -> str:
    """JSON text, two blanks per level, short collections on one line.

    >>> print(emit_json({"name": "mine", "entries": [{"pattern": ["torch.add", ".relu"]}]}), end="")
    {
      "name": "mine",
      "entries": [
        {
          "pattern": ["torch.add", ".relu"]
        }
      ]
    }
    """
    return _json(data, 0) + "\n"


def _json(value: Any, depth: int) -> str:
    if not isinstance(value, (dict, list)) or _flow(value, depth):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, list):
        lines = [inner + _json(item, depth + 1) for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{outer}]"
    lines = [
        f"{inner}{json.dumps(str(key), ensure_ascii=False)}: {_json(item, depth + 1)}"
        for key, item in value.items()
    ]
    return "{\n" + ",\n".join(lines) + f"\n{outer}}}"
