"""An exported file, loaded by the runtime that it is for: what it gives, and how long its parts take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from backquant.deploy.target import Target, check_installed, find_target, list_targets, usual_suffix
from backquant.errors import InputError, MissingExtraError, UsageError

__all__ = ["LoadingTarget", "Loaded", "RunningTarget", "Session", "load_exported", "running_target"]


class Loaded(Protocol):
    """A loaded file; arrays in and out, in the order of the model's."""

    @property
    def inputs(self) -> Mapping[str, Sequence[int | None]]:
        """The sizes of each input by its name, where the file has names; free ones are ``None``, or the
        greatest that may be."""
        ...

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call."""
        ...


@runtime_checkable
class LoadingTarget(Target, Protocol):
    """A target whose files can be run in this process."""

    def loaded(self, path: Path) -> Loaded:
        """Load a file that the target wrote, for one thread."""
        ...


class Session(Loaded, Protocol):
    """A loaded file that is timed."""

    def times(self, inputs: Sequence[Any], rounds: int) -> dict[str, float]:
        """Seconds of one call by the node of the reference graph that a layer was made for, the least of
        ``rounds``; under ``""`` what was made for none."""
        ...


@runtime_checkable
class RunningTarget(Target, Protocol):
    """A target whose runtime can run its files in this process."""

    def session(self, path: Path, threads: int) -> Session:
        """Load a file that the target wrote."""
        ...


def running_target(backend: str) -> RunningTarget | None:
    """The target that runs what is quantized for ``backend``; ``None`` where none does, or it is not
    installed.

    >>> running_target("tensorrt") is None
    True
    """
    for name in list_targets():
        target = find_target(name, Path(f"model{usual_suffix(name)}"))
        if target.backend == backend and isinstance(target, RunningTarget):
            try:
                check_installed(target)
            except MissingExtraError:
                return None
            return target
    return None


def load_exported(path: Path, threads: int) -> Loaded:
    """Load a file that ``export`` wrote in the runtime that it is for, with ``threads`` where that takes a
    number of them.

    Raises ``UsageError`` for a suffix that no target has, or whose target has no runtime here;
    ``InputError`` where there is no file; ``MissingExtraError`` where the runtime is not installed.

    >>> load_exported(Path("model.onnx"), 1)
    Traceback (most recent call last):
    backquant.errors.InputError: there is no file model.onnx
      where  model.onnx
      fix    the path that backquant.export was given
    """
    target = find_target(None, path)
    if not isinstance(target, LoadingTarget):
        raise UsageError(
            f"the files of {target.name} are not run here",
            where=str(path),
            fix="backquant.export to a target with a runtime: onnx, openvino, executorch, inductor",
        )
    if not path.is_file():
        raise InputError(
            f"there is no file {path}",
            where=str(path),
            fix="the path that backquant.export was given",
        )
    check_installed(target)
    return (
        target.session(path, threads) if isinstance(target, RunningTarget) else target.loaded(path)
    )
