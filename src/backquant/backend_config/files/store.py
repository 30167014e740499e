"""Saving and loading spec files. Writing is atomic; ``extends`` is followed here."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal

from backquant.backend_config.config import BackendConfig
from backquant.backend_config.files.check import structure_problems
from backquant.backend_config.files.earlier_names import with_current_names
from backquant.backend_config.files.emit import emit_json, emit_yaml
from backquant.backend_config.files.json_reader import read_json
from backquant.backend_config.files.located import Located, fail
from backquant.backend_config.files.names import Resolver
from backquant.backend_config.files.problems import SpecFileError
from backquant.backend_config.files.read import Base, build
from backquant.backend_config.files.write import to_data
from backquant.backend_config.files.yaml_reader import read_yaml
from backquant.backend_config.registry import get_backend_config, is_spec_file
from backquant.errors import BackquantError, SpecError, literal
from backquant.files import replace_file

__all__ = ["dumps", "load_file", "load_with_places", "loads", "save_file"]

_MOST = 1 << 20  # 30 times the largest that comes with backquant
Format = Literal["yaml", "json"]

_FORMATS: dict[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def dumps(config: BackendConfig, format: Format = "yaml") -> str:
    """The text of a spec file. Raises ``SpecError`` naming what has no import path.

    >>> print(dumps(BackendConfig("mine").set_engine("x86")), end="")
    schema_version: 1
    name: mine
    engine: x86
    entries: []
    """
    data = to_data(config)
    return emit_json(data) if _known(format) == "json" else emit_yaml(data)


def loads(
    text: str, format: Format = "yaml", *, file: str = "<text>", allow: tuple[str, ...] = ()
) -> BackendConfig:
    """The description in ``text``. ``file`` names it in errors; ``allow`` widens what may be imported.

    An ``extends`` with a file is relative to the working directory. Raises ``SpecError`` (SpecFileError).

    >>> loads("{schema_version: 1, name: mine}").name
    'mine'
    """
    source = _Source(file, Path.cwd(), _known(format))
    return _load(text, source, Resolver(allow), ()).config


def save_file(config: BackendConfig, path: str | os.PathLike[str]) -> None:
    """Write ``config`` as YAML (.yaml, .yml) or JSON (.json), by the suffix of ``path``.

    A temporary file in the same folder is renamed at the end: there is never a half-written file.
    Raises ``SpecError`` for another suffix, what cannot be stored, or a folder that cannot be
    written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file(BackendConfig("mine"), Path(folder) / "mine.json")
    ...     load_file(Path(folder) / "mine.json").name
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


def load_file(path: str | os.PathLike[str], allow: tuple[str, ...] = ()) -> BackendConfig:
    """Read the spec file at ``path``. ``allow``: packages, beyond torch and backquant, to import from.

    Raises ``SpecError`` (SpecFileError, with file, line and field of everything that is wrong).
    See ``save_file`` for an example.
    """
    return load_with_places(path, allow).config


def load_with_places(path: str | os.PathLike[str], allow: tuple[str, ...] = ()) -> Base:
    """Like ``load_file``, with the file and line of every entry that came from a file."""
    return _load_path(Path(path), Resolver(allow), ())


class _Source:
    """Where text came from: its name in messages, the folder of relative files, its format."""

    def __init__(self, name: str, folder: Path, format: Format) -> None:
        self.name = name
        self.folder = folder
        self.format = format


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
    problems = structure_problems(tree, source.name)
    if problems:
        raise SpecFileError(problems)
    tree = with_current_names(tree, source.name)
    base = _base(tree, source, resolver, chain)
    try:
        return build(tree, source.name, resolver, base)
    except RecursionError:
        raise SpecError("a pattern is too long", where=source.name) from None


def _base(
    tree: Located, source: _Source, resolver: Resolver, chain: tuple[Path, ...]
) -> Base | None:
    """What the file extends: a file when the value looks like one, else a backend's name."""
    value = tree.value.get("extends")
    if value is None or value.value is None:
        return None
    extends: str = value.value
    if not is_spec_file(extends):
        try:
            return Base(get_backend_config(extends))
        except BackquantError as error:
            raise fail(source.name, value.line, ("extends",), error.what, error.fix) from error
    path = source.folder / extends
    _check_folder(path, source, resolver, value.line)
    if path.resolve() in chain:
        names = " → ".join(item.name for item in (*chain, path.resolve()))
        message = f"a file extends itself: {names}"
        raise fail(source.name, value.line, ("extends",), message, "remove one extends")
    try:
        return _load_path(path, resolver, chain)
    except SpecFileError:
        raise
    except SpecError as error:
        message = f"{extends}: {error.what}"
        raise fail(source.name, value.line, ("extends",), message, error.fix) from error


def _check_folder(path: Path, source: _Source, resolver: Resolver, line: int | None) -> None:
    """A file extends files of its own folder, and of those that the caller allows."""
    here = (source.folder.resolve(), *resolver.folders)
    try:
        place = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no name of a file
        message = f"this is no place of a file: {error}"
        raise fail(source.name, line, ("extends",), message) from error
    if not any(place.is_relative_to(folder) for folder in here):
        raise fail(
            source.name,
            line,
            ("extends",),
            "this file lies outside of the folder of the description",
            f"if you trust it, allow its folder where the file is loaded: allow=({literal(path.parent)},)",
        )


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
