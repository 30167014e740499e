"""One model of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Entry"]


@dataclass(frozen=True)
class Entry:
    """``make`` builds the model; ``inputs`` a batch in the form of example inputs.

    ``others``: arguments of ``inputs`` for batches of other sizes that the float model takes.
    ``options``: keywords for ``backquant.quantize``.
    """

    name: str
    make: Callable[[], Any]
    inputs: Callable[..., Any]
    others: tuple[tuple[Any, ...], ...] = ()
    options: dict[str, Any] | None = None

    def called(self, name: str) -> Entry:
        return replace(self, name=name)

    def with_inputs(self, inputs: Callable[..., Any]) -> Entry:
        return replace(self, inputs=inputs)
