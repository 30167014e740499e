"""What is judged: an engine takes a calibrated model, and runs it on inputs.

An engine of another kind (a runtime that reads exported files, a vendor's simulator) is a class with these
members; ``conform(backend, engine=...)`` takes an instance of it, ``--engine mypkg:ENGINE`` its import path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, fx

from backquant.match.plan import Reason


class RefusedByEngineError(Exception):
    """The engine does not take the model; the message is what it says."""


class NotAskedError(RefusedByEngineError):
    """The engine cannot be asked about the model; the message says why. The case is untried."""


@dataclass(frozen=True)
class Ran:
    """The kernels that a built model runs on, by name, and what of it stays float, with the reasons."""

    kernels: tuple[str, ...]
    in_float: tuple[Reason, ...] = ()


@runtime_checkable
class BuiltModel(Protocol):
    """A model that an engine has built: its kernels, and its result on inputs."""

    @property
    def ran(self) -> Ran:
        """What it runs on."""
        ...

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The result, of any input sizes that the float model takes. Raises ``RefusedByEngineError``."""
        ...


@runtime_checkable
class ConformanceEngine(Protocol):
    """What cases are run on.

    ``takes_sizes``: whether a model, once built, takes batches of other sizes and other memory layouts.
    """

    @property
    def name(self) -> str:
        """What pages and outcomes call it."""
        ...

    @property
    def takes_sizes(self) -> bool:
        """See above."""
        ...

    def versions(self) -> dict[str, str]:
        """The versions that a page and a reproducer state. Raises ``EngineError`` where it does not run."""
        ...

    def build(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> BuiltModel:
        """Convert a calibrated model, which is not changed. Raises ``RefusedByEngineError``."""
        ...


@dataclass(frozen=True)
class Build:
    """What an engine is asked to build: a calibrated model, and inputs of the sizes of its calls."""

    prepared: fx.GraphModule
    example: tuple[Tensor, ...]


#: What came of it.
Answer = BuiltModel | RefusedByEngineError


@runtime_checkable
class GroupingEngine(ConformanceEngine, Protocol):
    """An engine that builds several models in the time of one: as one file, or one compilation.

    ``group``: how many. Where such a build or a call of it dies, each of its cases is tried by itself.
    """

    @property
    def group(self) -> int:
        """See above."""
        ...

    def build_all(self, builds: Sequence[Build]) -> list[Answer]:
        """Convert models that have nothing to do with each other."""
        ...
