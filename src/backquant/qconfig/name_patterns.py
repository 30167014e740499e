"""Regular expressions for names of modules, in time that grows with their length and that of the name alone.

``re`` goes back and tries again: ``(a+)+b`` takes twice as long for each further ``a``. Whether a pattern
matches needs no such thing. A set of places of the text, the bits of one integer, goes through the parts of
a pattern: each gives the set of places where it may end.

What would need to know which part of the text a group took (back-references, conditions on groups, atomic
groups and possessive quantifiers) is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser as parser
else:
    import sre_parse as parser

__all__ = ["NamePattern"]

_WORD, _SPACE = "word", "space"


class NamePattern:
    """A compiled pattern. Raises ``ValueError`` (``re.error`` is one) for what is none, or is not supported.

    >>> pattern = NamePattern(r"(layers\\.\\d+\\.)*fc$")
    >>> pattern.matches("layers.0.layers.1.fc"), pattern.matches("layers.x.fc")
    (True, False)
    >>> NamePattern("(a+)+b").matches("a" * 2000)
    False
    >>> NamePattern(r"(a)\\1")
    Traceback (most recent call last):
    ValueError: groupref is not supported in names of modules
    """

    def __init__(self, text: str) -> None:
        try:
            tree: Any = parser.parse(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        except (re.error, OverflowError) as error:
            raise ValueError(str(error)) from error
        self._tree: Iterable[Any] = tree
        self._flags = tree.state.flags
        _Run("", self._flags).sequence(self._tree, 1)  # refuses what is not supported

    def matches(self, name: str) -> bool:
        """Whether the pattern matches from the start of ``name``, as ``re.match`` does."""
        return bool(_Run(name, self._flags).sequence(self._tree, 1))


@dataclass
class _Run:
    """One text. A set of places is an integer, whose bit ``p`` stands for the place before character ``p``;
    ``sets``: those that are known."""

    text: str
    flags: int
    sets: dict[Any, int] = field(default_factory=dict)

    @property
    def _all(self) -> int:
        return (1 << (len(self.text) + 1)) - 1

    def sequence(self, parts: Iterable[Any], places: int) -> int:
        """Where ``parts``, one after the other, may end that begin at one of ``places``."""
        for kind, value in parts:
            name = str(kind).lower()
            step = getattr(self, f"_{name}", None)
            if step is not None:
                places = step(value, places)
            elif name in ("literal", "not_literal", "any", "in"):
                places = (places & self._characters(name, value)) << 1
            else:
                raise ValueError(f"{name} is not supported in names of modules")
        return places

    def _branch(self, value: Any, places: int) -> int:
        found = 0
        for parts in value[1]:
            found |= self.sequence(parts, places)
        return found

    def _subpattern(self, value: Any, places: int) -> int:
        _, added, removed, parts = value
        flags = (self.flags | added) & ~removed
        return _Run(self.text, flags, self.sets).sequence(parts, places)

    def _max_repeat(self, value: Any, places: int) -> int:
        least, most, parts = value
        for _ in range(min(least, len(self.text) + 1)):  # then each further one is empty
            places = self.sequence(parts, places)
        found, rest = places, most - least
        while places and rest > 0:
            places = self.sequence(parts, places) & ~found
            found, rest = found | places, rest - 1
        if not found:  # what is not supported is seen in any case
            self.sequence(parts, 0)
        return found

    _min_repeat = _max_repeat

    def _assert(self, value: Any, places: int) -> int:
        direction, parts = value
        key = (id(parts), self.flags)
        if key not in self.sets:  # of each place, once: assertions in assertions add up
            begins = (1 << place for place in range(len(self.text) + 1))
            self.sets[key] = (
                self.sequence(parts, self._all)
                if direction < 0
                else sum(begin for begin in begins if self.sequence(parts, begin))
            )
        return places & self.sets[key]

    def _assert_not(self, value: Any, places: int) -> int:
        return places & ~self._assert(value, places)

    def _at(self, value: Any, places: int) -> int:
        name, end = str(value).lower(), len(self.text)
        is_multiline = bool(self.flags & re.MULTILINE)
        if name in ("at_boundary", "at_non_boundary"):
            words = self._characters("category", _WORD)
            edges = (words ^ (words << 1)) & self._all
            inner = ~edges if end else 0  # nothing has no places within
            return places & (edges if name == "at_boundary" else inner)
        lines = self._characters("literal", ord("\n")) if is_multiline else 0
        if name in ("at_beginning", "at_beginning_string"):
            return places & (1 | (lines << 1 if name == "at_beginning" else 0))
        last = 1 << (end - 1) if self.text.endswith("\n") and name == "at_end" else 0
        return places & (1 << end | last | (lines if name == "at_end" else 0))

    def _characters(self, kind: str, value: Any) -> int:
        """The places before characters that are meant."""
        key = (kind, str(value), self.flags)
        if key not in self.sets:
            is_meant = self._meaning(kind, value)
            meant = (1 << p for p, character in enumerate(self.text) if is_meant(character))
            self.sets[key] = sum(meant)
        return self.sets[key]

    def _meaning(self, kind: str, value: Any) -> Callable[[str], bool]:
        if kind == "any":
            return lambda c: c != "\n" or bool(self.flags & re.DOTALL)
        if kind == "category":
            return partial(_is_of_category, value, bool(self.flags & re.ASCII))
        negates = kind == "not_literal"
        items = value if kind == "in" else [("literal", value)]
        names = [(str(name).lower(), item) for name, item in items]
        negates ^= ("negate", None) in names
        ignores = bool(self.flags & re.IGNORECASE)

        def is_meant(character: str) -> bool:
            forms = {character, character.lower(), character.upper()} if ignores else {character}
            return negates != any(self._is_item(name, item, forms) for name, item in names)

        return is_meant

    def _is_item(self, name: str, item: Any, forms: set[str]) -> bool:
        if name == "category":
            word = str(item).lower().removeprefix("category_")
            kind = word.removeprefix("not_")
            is_ascii = bool(self.flags & re.ASCII)
            return (kind != word) != any(_is_of_category(kind, is_ascii, form) for form in forms)
        codes = [ord(form) for form in forms if len(form) == 1]
        if name == "range":
            return any(item[0] <= code <= item[1] for code in codes)
        return name == "literal" and item in codes


def _is_of_category(kind: str, is_ascii: bool, character: str) -> bool:
    if is_ascii and not character.isascii():
        return False
    if kind == _WORD:
        return character.isalnum() or character == "_"
    return character.isspace() if kind == _SPACE else character.isdecimal()
