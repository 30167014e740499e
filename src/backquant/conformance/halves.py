"""What is built together and fails, is built by halves, until it is known which part of it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from backquant.conformance.seam import Answer, RefusedByEngineError
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
