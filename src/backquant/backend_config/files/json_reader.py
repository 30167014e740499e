"""JSON text to located values. Duplicate keys are errors, as are NaN and Infinity (not JSON)."""

from __future__ import annotations

import re
from bisect import bisect_right
from json import JSONDecodeError, JSONDecoder
from typing import Any

from backquant.backend_config.files.located import MAX_DEPTH, Located, Path, fail
from backquant.errors import quoted

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None}
_WORD = re.compile(r"[A-Za-z]+")
_MAX_DIGITS = 400
_STRINGS = JSONDecoder()  # used at a double quote only


class _Reader:
    """A cursor over one text. Methods consume from ``position``."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.position = 0
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def line(self) -> int:
        return bisect_right(self.starts, self.position)

    def error(self, message: str, path: Path = (), fix: str = "") -> Exception:
        return fail(self.file, self.line(), path, message, fix)

    def peek(self) -> str:
        match = _SPACE.match(self.text, self.position)
        assert match is not None  # the pattern matches the empty string
        self.position = match.end()
        return self.text[self.position : self.position + 1]

    def expect(self, mark: str) -> None:
        found = self.peek()
        if found != mark:
            raise self.error(f"not valid JSON: expected {mark!r}, found {found or 'the end'!r}")
        self.position += 1

    def value(self, depth: int) -> Located:
        mark = self.peek()
        line = self.line()
        if depth > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels")
        if mark == "{":
            return self.mapping(line, depth)
        if mark == "[":
            return self.sequence(line, depth)
        if mark == '"':
            return Located(self.string(), line)
        return Located(self.scalar(mark), line)

    def string(self) -> str:
        if self.peek() != '"':
            raise self.error("not valid JSON: expected a text in double quotes")
        try:
            text, self.position = _STRINGS.raw_decode(self.text, self.position)
        except JSONDecodeError as error:
            self.position = error.pos
            raise self.error(f"not valid JSON: {error.msg}") from None
        return str(text)

    def scalar(self, mark: str) -> Any:
        number = _NUMBER.match(self.text, self.position)
        if number:
            text = number.group()
            if len(text) > _MAX_DIGITS:
                raise self.error("not valid JSON: a number of more than 400 digits")
            self.position = number.end()
            return float(text) if number.group(1) or number.group(2) else int(text)
        word = _WORD.match(self.text, self.position)
        if word and word.group() in _WORDS:
            self.position = word.end()
            return _WORDS[word.group()]
        raise self.error(f"not valid JSON: unexpected {mark or 'end of the file'!r}")

    def sequence(self, line: int, depth: int) -> Located:
        self.expect("[")
        items: list[Located] = []
        if self.peek() == "]":
            self.position += 1
            return Located(items, line)
        while True:
            items.append(self.value(depth + 1))
            if self.peek() != ",":
                self.expect("]")
                return Located(items, line)
            self.position += 1

    def mapping(self, line: int, depth: int) -> Located:
        self.expect("{")
        values: dict[str, Located] = {}
        key_lines: dict[str, int] = {}
        if self.peek() == "}":
            self.position += 1
            return Located(values, line)
        while True:
            self.peek()
            key_line = self.line()
            key = self.string()
            if key in values:
                raise self.error(
                    f"the key {quoted(key)} appears twice (first on line {key_lines[key]})",
                    (key,),
                    "remove one of the two",
                )
            self.expect(":")
            key_lines[key] = key_line
            values[key] = self.value(depth + 1)
            if self.peek() != ",":
                self.expect("}")
                return Located(values, line, key_lines)
            self.position += 1


def read_json(text: str, file: str) -> Located:
    """Parse JSON text. ``file`` names it in errors. Raises SpecFileError (a SpecError).

    >>> read_json('{"a": 1,\\n "b": [2]}', "a.json").key_lines
    {'a': 1, 'b': 2}
    """
    reader = _Reader(text.removeprefix("\ufeff"), file)
    tree = reader.value(0)
    if reader.peek():
        raise reader.error("not valid JSON: text after the end of the value")
    return tree
