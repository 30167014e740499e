"""What the lifting of an exported graph has to be told about operators, as an interface.

``graph`` stands below ``operators``: the table comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import fx, nn


@dataclass(frozen=True)
class Call:
    """A call as symbolic tracing would have recorded it."""

    kind: Literal["call_function", "call_method"]
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Speller(Protocol):
    """Knows the spellings of operators."""

    def composed(self, node: fx.Node) -> fx.Node | None:
        """One call for the several that an operator was decomposed to, if they end in ``node``.

        It is inserted before ``node`` and has its meta data; ``None`` where nothing was decomposed.
        """

    def call(self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """The spelling that entries of backends use; ``None`` for an operator without one."""

    def module(
        self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> nn.Module | None:
        """A module that does what a call does to its input; ``args`` hold tensors for its weights."""
