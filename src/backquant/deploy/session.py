"""An exported file, loaded by the runtime that it is for: what it gives, and how long its parts take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from backquant.deploy.target import Target, check_installed, find_target, list_targets, usual_suffix
from backquant.errors import MissingExtraError

__all__ = ["LoadingTarget", "Loaded", "RunningTarget", "Session", "running_target"]


class Loaded(Protocol):
    """A loaded file; arrays in and out, in the order of the model's."""

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
