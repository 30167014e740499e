"""Patterns as nested calls, in which a value that is used twice has a letter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backquant.backend_config.pattern import NormalPattern


def calls_text(pattern: NormalPattern, name: Callable[[Any], str]) -> str:
    """``last(before(…), …)`` with operators named by ``name``.

    Anything is ``*``; what is used twice gets a letter where it first stands.

    >>> import torch
    >>> from backquant.backend_config import GraphPattern
    >>> swish = GraphPattern(["x"], {"gate": (torch.sigmoid, "x"), "out": (torch.mul, "x", "gate")})
    >>> print(calls_text(swish.normal, lambda op: op.__name__))
    mul(a, sigmoid(a))
    """
    return _Text(pattern, name).whole()


class _Text:
    def __init__(self, pattern: NormalPattern, name: Callable[[Any], str]) -> None:
        self._pattern = pattern
        self._name = name
        uses = Counter(i for node in pattern.nodes for i in node.inputs or ())
        literals = {i for i, node in enumerate(pattern.nodes) if node.kind == "literal"}
        self._shared = {i for i, count in uses.items() if count > 1 and i not in literals}
        self._letters: dict[int, str] = {}
        self._free: Iterator[str] = _letters()

    def whole(self) -> str:
        return self._at(len(self._pattern.nodes) - 1)

    def _at(self, index: int) -> str:
        if index in self._letters:
            return self._letters[index]
        node = self._pattern.nodes[index]
        if index in self._shared:
            self._letters[index] = next(self._free)
            if node.kind == "any":
                return self._letters[index]
            return f"{self._letters[index]}={self._call(index)}"
        return "*" if node.kind == "any" else self._call(index)

    def _call(self, index: int) -> str:
        node = self._pattern.nodes[index]
        name = repr(node.op) if node.kind == "literal" else self._name(node.op)
        if node.inputs is None:
            return name
        inside = ", ".join(map(self._at, node.inputs))
        order = "; any order" if node.any_order else ""
        return f"{name.removesuffix('()')}({inside}{order})"


def _letters() -> Iterator[str]:
    """a, b, …, z, a1, b1, …"""
    number = 0
    while True:
        yield from (f"{letter}{number or ''}" for letter in ascii_lowercase)
        number += 1
