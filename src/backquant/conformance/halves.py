"""Engines that build several models in the time of one: what fails together is built by halves, until it is
known which part of it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, fx

from backquant.conformance.engine_protocol import Answer, Build, BuiltModel, RefusedByEngineError
from backquant.conformance.torch_engines import said
from backquant.errors import BackquantError

T = TypeVar("T")


def built_by_halves(
    parts: Mapping[int, T], build: Callable[[Sequence[T]], Sequence[Answer]]
) -> dict[int, Answer]:
    """What ``build`` makes of each part.

    >>> def build(parts):
    ...     if 0 in parts:
    ...         raise RuntimeError("none")
    ...     return [str(part) for part in parts]
    >>> {at: str(made) for at, made in built_by_halves({0: 3, 1: 0, 2: 5}, build).items()}
    {0: '3', 1: 'RuntimeError: none', 2: '5'}
    """
    if not parts:
        return {}
    try:
        return dict(zip(parts, build(list(parts.values())), strict=True))
    except (BackquantError, RuntimeError) as error:
        if len(parts) == 1:
            return dict.fromkeys(parts, RefusedByEngineError(said(error)))
    items = list(parts.items())
    half = len(items) // 2
    return {
        **built_by_halves(dict(items[:half]), build),
        **built_by_halves(dict(items[half:]), build),
    }


class BuildsTogether(Generic[T]):
    """A part of an engine: ``build`` and ``build_all``, from what one model is made ready as and how several
    of these are built."""

    def _ready(self, each: Build) -> T | BuiltModel:
        """A model as it is built beside others; or already built, where nothing is left to do."""
        raise NotImplementedError

    def _built(self, parts: Sequence[T]) -> list[Answer]:
        """What was made ready, built as one."""
        raise NotImplementedError

    def build(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> Any:
        [answer] = self.build_all([Build(prepared, example)])
        if isinstance(answer, RefusedByEngineError):
            raise answer
        return answer

    def build_all(self, builds: Sequence[Build]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        parts: dict[int, T] = {}
        for at, each in enumerate(builds):
            try:
                made = self._ready(each)
            except RefusedByEngineError as error:
                answers[at] = error
            except (BackquantError, RuntimeError) as error:
                answers[at] = RefusedByEngineError(said(error))
            else:
                if isinstance(made, BuiltModel):
                    answers[at] = made
                else:
                    parts[at] = made
        answers.update(built_by_halves(parts, self._built))
        return [answers[at] for at in range(len(builds))]
