"""Deployment targets: the protocol, the registry, and whether a target can be used here.

A target of another package is an entry point of the group ``backquant.targets``: it names an object
that has the attributes of ``Target``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol, runtime_checkable

from backquant.convert import IntegerEdges
from backquant.deploy.exported import Written
from backquant.deploy.job import ExportJob
from backquant.entry_points import read_entry_point
from backquant.errors import ExportError, MissingExtraError, UsageError, did_you_mean
from backquant.files import is_folder, replacing
from backquant.match.plan import Reason

_GROUP = "backquant.targets"

#: The targets of this package; they need no installed metadata and cannot be replaced.
_BUILT_IN = {
    "onnx": "backquant.deploy.onnxruntime:TARGET",
    "openvino": "backquant.deploy.openvino:TARGET",
    "tensorrt": "backquant.deploy.tensorrt.target:TARGET",
    "executorch": "backquant.deploy.executorch:TARGET",
    "inductor": "backquant.deploy.inductor:TARGET",
    "qdq-onnx": "backquant.deploy.qdq_onnx:TARGET",
    "pt2e": "backquant.deploy.pt2e:TARGET",
    "litert": "backquant.deploy.litert:TARGET",
    "compressed-tensors": "backquant.deploy.checkpoints.target:COMPRESSED_TENSORS",
    "gptq": "backquant.deploy.checkpoints.target:GPTQ",
    "awq": "backquant.deploy.checkpoints.target:AWQ",
    "mlx": "backquant.deploy.checkpoints.target:MLX",
    "torchao": "backquant.deploy.checkpoints.target:TORCHAO",
    "gguf": "backquant.deploy.checkpoints.target:GGUF",
    "ethos-u": "backquant.deploy.ethos_u:TARGET",
}


@dataclass(frozen=True)
class Requirement:
    """A package that a target needs, with the versions it was tested with (first and last, inclusive).

    ``package``: the name of the distribution; ``module``: what is imported. No range: any version.
    """

    package: str
    module: str
    first: str = ""
    last: str = ""

    @property
    def tested(self) -> str:
        """The range as text.

        >>> Requirement("onnxruntime", "onnxruntime", "1.21", "1.31").tested
        '1.21 to 1.31'
        """
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


@runtime_checkable
class Target(Protocol):
    """One deployment target: a format, and the runtime that reads it back.

    ``backend``: the name of the backend to quantize for. ``suffixes``: of its files, the usual first; none:
    it writes folders.
    ``extra``: the extra of backquant that installs ``requires``. ``options``: the keys that
    ``backquant.export(..., options=...)`` may have.
    """

    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def suffixes(self) -> tuple[str, ...]: ...
    @property
    def extra(self) -> str: ...
    @property
    def requires(self) -> tuple[Requirement, ...]: ...
    @property
    def options(self) -> tuple[str, ...]: ...

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """What the target cannot take, node by node, found before anything is written."""
        ...

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write the file (and others beside it) and read back what the runtime makes of it.

        ``path`` has the file's final name, in an empty folder of its own: everything that is written
        there is moved to where the user wants it.
        """
        ...


@runtime_checkable
class IntegerTarget(Target, Protocol):
    """A target with ``edges`` of its own where ``integer_io`` says nothing."""

    @property
    def edges(self) -> IntegerEdges: ...


def list_targets() -> list[str]:
    """Names of all targets: those of this package, then those of other packages by name.

    >>> list_targets()[:2]
    ['onnx', 'openvino']
    """
    own = list(_BUILT_IN)
    others = {point.name for point in metadata.entry_points(group=_GROUP)}
    return own + sorted(others - set(own))


def usual_suffix(name: str) -> str:
    """How files of the target ``name`` end. Raises ``UsageError`` for a name that no target has.

    >>> usual_suffix("openvino")
    '.xml'
    """
    return next(iter(target_named(name).suffixes), "")


def find_target(name: str | None, path: Path, backend: str = "") -> Target:
    """The target called ``name``, or, for ``None``, the one whose files end like ``path``.

    Of several it is the one that ``backend``, which a model was quantized for, belongs to
    (``tensorrt`` and ``tensorrt_fp8`` to the target of that name), else the first.

    Raises ``UsageError`` for a name or suffix that no target has.

    >>> find_target(None, Path("model.onnx")).name
    'onnx'
    >>> find_target(None, Path("model.onnx"), "tensorrt_fp8").name
    'tensorrt'
    """
    if name is not None:
        return _checked_suffix(target_named(name), path)
    targets = [_load(other) for other in list_targets()]
    targets = [target for target in targets if target.suffixes]
    fitting = [target for target in targets if path.suffix in target.suffixes]
    meant = [t for t in fitting if backend == t.backend or backend.startswith(f"{t.backend}_")]
    for target in (*meant, *fitting):
        return target
    known = ", ".join(f"{target.suffixes[0]} ({target.name})" for target in targets)
    raise UsageError(
        f"no target has files that end in {path.suffix!r}",
        where=str(path),
        fix=f"end the name in one of {known}, or pass to=",
    )


def is_exported(path: Path) -> bool:
    """Whether a file is one of a target, by its suffix.

    >>> is_exported(Path("model.onnx")), is_exported(Path("model.bq"))
    (True, False)
    """
    return any(path.suffix in _load(name).suffixes for name in list_targets() if path.suffix)


def target_named(name: str) -> Target:
    """The target of that name. Raises ``UsageError`` for a name that no target has.

    >>> target_named("onnx").name
    'onnx'
    """
    names = list_targets()
    if name not in names:
        of_backend = [known for known in names if _load(known).backend == name]
        meant = did_you_mean(of_backend[0] if of_backend else name, names)
        raise UsageError(
            f"there is no target {name!r}" + (f" ({meant})" if meant else ""),
            where="to",
            fix=f"one of {', '.join(names)}",
        )
    return _load(name)


def _checked_suffix(target: Target, path: Path) -> Target:
    if target.suffixes and path.suffix not in target.suffixes:
        raise UsageError(
            f"the files of {target.name} do not end in {path.suffix!r}",
            where=str(path),
            fix=f"{path.with_suffix(target.suffixes[0])}",
        )
    return target


def _load(name: str) -> Target:
    if name not in _BUILT_IN:
        [point, *_] = metadata.entry_points(group=_GROUP, name=name)
        fix = "an object with the attributes of backquant.deploy.Target"
        return read_entry_point(point, Target, "target", UsageError, fix)  # type: ignore[type-abstract]
    module, _, attribute = _BUILT_IN[name].partition(":")
    target: Target = getattr(importlib.import_module(module), attribute)
    return target


def check_installed(target: Target) -> None:
    """Raise ``MissingExtraError``, which names the extra, when a package of the target is missing."""
    missing = [need.package for need in target.requires if not _found(need.module)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"exporting to {target.name} needs {', '.join(missing)}, which {verb} not installed",
            extra=target.extra,
            where=f"to={target.name!r}",
        )


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


_WARNED: set[tuple[str, str]] = set()


def check_version(target: Target) -> None:
    """Warn, once a process for each package, when its version is outside the tested range."""
    for need in target.requires:
        if not need.first:
            continue
        have = metadata.version(need.package)
        key = (need.package, have)
        if key in _WARNED or _numbers(need.first) <= _numbers(have, need.last) <= _numbers(
            need.last
        ):
            continue
        _WARNED.add(key)
        warnings.warn(
            f"{need.package} {have} is outside of the versions that exporting to {target.name} was "
            f"tested with: {need.tested}",
            UserWarning,
            stacklevel=4,
        )


def _numbers(version: str, like: str = "") -> tuple[int, ...]:
    """``version`` as numbers, to as many places as ``like`` has."""
    parts = version.split("+", maxsplit=1)[0].split(".")
    places = len(like.split(".")) if like else len(parts)
    return tuple(int(part) if part.isdecimal() else 0 for part in parts[:places])


# Files of an export appear whole or not at all.


def check_place(path: Path, overwrite: bool) -> None:
    """Raise ``UsageError`` when a file is there already, or its folder is not.

    >>> check_place(Path("."), overwrite=True)
    Traceback (most recent call last):
    backquant.errors.UsageError: . is a folder
      where  path
      fix    name a file in it
    """
    if is_folder(path):
        raise UsageError(f"{path} is a folder", where="path", fix="name a file in it")
    if not is_folder(path.parent):
        raise UsageError(
            f"there is no folder {path.parent}", where="path", fix=f"mkdir -p {path.parent}"
        )
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{path} exists", where="path", fix="overwrite=True   # or another name")


@contextmanager
def staged(path: Path, files: list[Path]) -> Iterator[Path]:
    """A path in an empty folder beside ``path``; what is written there is moved when all went well.

    ``files`` is filled with where the files are then, ``path`` first. A link is replaced by the file, so
    that what belongs together lies together.
    """
    try:
        with replacing(path) as staging:
            yield staging
            names = sorted(staging.parent.iterdir(), key=lambda item: item != staging)
            if staging not in names:
                raise ExportError(f"the target wrote no {path.name}", where=str(path))
        files += [path.parent / item.name for item in names]
    except OSError as error:
        elsewhere = error.filename is not None and Path(error.filename).is_dir()
        raise ExportError(
            f"{path} cannot be written: {error.strerror or error}"
            + (f" in {error.filename}" if elsewhere else ""),
            where=str(path),
            fix="make room, or choose a folder that can be written to",
        ) from error
