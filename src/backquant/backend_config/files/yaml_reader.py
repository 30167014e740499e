"""YAML text to located values.

Composed, never constructed: no tag of the file can create an object. Scalars follow YAML 1.2's core
schema (``on``, ``yes`` and dates are strings; ``1e-5`` is a number). Duplicate keys are errors.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from backquant.backend_config.files.located import MAX_DEPTH, MAX_VALUES, Located, fail
from backquant.errors import quoted

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_TRUE = ("true", "True", "TRUE")
_FALSE = ("false", "False", "FALSE")
_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_SPECIAL = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf")}
_STR_TAG = "tag:yaml.org,2002:str"
_MAX_DIGITS = 40


class _Loader(yaml.SafeLoader):
    """SafeLoader whose scalars stay untyped; ``_scalar`` decides what they are."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own protocol)
    nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values")
        return super().compose_node(parent, index)


class _Reader:
    """One file being read: its name, and how many values it has expanded to."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.count = 0

    def value(self, node: yaml.Node, depth: int) -> Located:
        line = node.start_mark.line + 1
        self.count += 1
        if depth > MAX_DEPTH:
            raise fail(self.file, line, (), f"nested deeper than {MAX_DEPTH} levels")
        if self.count > MAX_VALUES:
            raise fail(self.file, line, (), f"more than {MAX_VALUES} values (through aliases?)")
        if isinstance(node, yaml.ScalarNode):
            return Located(self.scalar(node), line)
        if isinstance(node, yaml.SequenceNode):
            self.refuse_tag(node, "tag:yaml.org,2002:seq")
            return Located([self.value(item, depth + 1) for item in node.value], line)
        self.refuse_tag(node, "tag:yaml.org,2002:map")
        return self.mapping(node, line, depth)

    def mapping(self, node: yaml.Node, line: int, depth: int) -> Located:
        values: dict[str, Located] = {}
        key_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise fail(self.file, key_line, (), "a key must be a plain word")
            key = key_node.value
            if key in values:
                raise fail(
                    self.file,
                    key_line,
                    (key,),
                    f"the key {quoted(key)} appears twice (first on line {key_lines[key]})",
                    "remove one of the two",
                )
            key_lines[key] = key_line
            values[key] = self.value(value_node, depth + 1)
        return Located(values, line, key_lines)

    def scalar(self, node: yaml.ScalarNode) -> Any:
        self.refuse_tag(node, _STR_TAG)
        text: str = node.value
        return text if node.style is not None else plain_scalar(text)

    def refuse_tag(self, node: yaml.Node, expected: str) -> None:
        if node.tag != expected:
            line = node.start_mark.line + 1
            message = f"the tag {node.tag!r} is not supported"
            raise fail(self.file, line, (), message, "write plain values; no object is created")


def plain_scalar(text: str) -> Any:
    """An unquoted scalar by YAML 1.2's core schema.

    >>> [plain_scalar(text) for text in ("yes", "1e-5", "8", "true", "null", "2**-12")]
    ['yes', 1e-05, 8, True, None, '2**-12']
    """
    if _NULL.match(text):
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text.lower() in _SPECIAL:
        return _SPECIAL[text.lower()]
    if text.lower() == ".nan":
        return float("nan")
    if len(text) <= _MAX_DIGITS:
        if _INT.match(text):
            return int(text)
        if _FLOAT.match(text):
            return float(text)
    return text


def read_yaml(text: str, file: str) -> Located:
    """Parse YAML text. ``file`` names it in errors. Raises SpecFileError (a SpecError).

    >>> read_yaml("name: a\\nentries: []", "a.yaml").key_lines
    {'name': 1, 'entries': 2}
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise fail(file, line, (), f"not valid YAML: {message}") from None
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise fail(file, None, (), f"not valid YAML: {first}") from None
    except (OverflowError, ValueError) as error:  # "\\UFFFFFFFF"
        raise fail(file, None, (), f"not valid YAML: {error}") from None
    except RecursionError:
        raise fail(file, None, (), f"nested deeper than {MAX_DEPTH} levels") from None
    if node is None:
        raise fail(file, 1, (), "the file is empty", "start with: schema_version: 1")
    return _Reader(file).value(node, 0)
