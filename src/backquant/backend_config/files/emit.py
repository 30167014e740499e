"""Plain data as YAML or JSON text: short collections on one line, long ones over several."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import yaml

WIDTH = 100
_BLOCK_DEPTH = 2  # the file, its sections, and their items are written over several lines
_SHORT = 84


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes what YAML 1.2 (and ``yaml_reader``) would take for a number."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def emit_yaml(data: dict[str, Any]) -> str:
    """YAML text that ``read_yaml`` turns into the same data.

    >>> print(emit_yaml({"name": "mine", "entries": [{"pattern": ["torch.add", ".relu"]}]}))
    name: mine
    entries:
    - pattern: [torch.add, .relu]
    <BLANKLINE>
    """
    text: str = yaml.serialize(_node(data, 0), Dumper=_Dumper, width=WIDTH, allow_unicode=True)
    return text


def _node(value: Any, depth: int) -> yaml.Node:
    if isinstance(value, dict):
        pairs = [(_node(key, depth + 1), _node(item, depth + 1)) for key, item in value.items()]
        flow = _flow(value, depth)
        return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=flow)
    if isinstance(value, list):
        items = [_node(item, depth + 1) for item in value]
        return yaml.SequenceNode("tag:yaml.org,2002:seq", items, flow_style=_flow(value, depth))
    scalar: yaml.ScalarNode = cast("Any", _Dumper(_Sink())).represent_data(value)
    if isinstance(value, str) and not value.isprintable():
        scalar.style = '"'  # with escapes: the other styles lose some line breaks
    return scalar


def _flow(value: Any, depth: int) -> bool:
    return not value or (depth > _BLOCK_DEPTH and len(json.dumps(value)) <= _SHORT)


class _Sink:
    """A stream that nobody reads: a Dumper wants one even for a single node."""

    def write(self, text: str) -> None:
        """Drop ``text``."""


def emit_json(data: dict[str, Any]) -> str:
    """JSON text, two blanks per level, short collections on one line.

    >>> print(emit_json({"name": "mine", "entries": [{"pattern": ["torch.add", ".relu"]}]}), end="")
    {
      "name": "mine",
      "entries": [
        {
          "pattern": ["torch.add", ".relu"]
        }
      ]
    }
    """
    return _json(data, 0) + "\n"


def _json(value: Any, depth: int) -> str:
    if not isinstance(value, (dict, list)) or _flow(value, depth):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, list):
        lines = [inner + _json(item, depth + 1) for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{outer}]"
    lines = [
        f"{inner}{json.dumps(str(key), ensure_ascii=False)}: {_json(item, depth + 1)}"
        for key, item in value.items()
    ]
    return "{\n" + ",\n".join(lines) + f"\n{outer}}}"
