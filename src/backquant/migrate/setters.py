"""Dict configs as calls of setters: ``{"": q}`` is ``QConfigMapping().set_global(q)``.

What a dict says in a way that setters cannot say with the same meaning (unpacking, keys that are not
literals, standalone modules with configs of their own) is not translated; the caller then keeps the
dict and wraps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

#: A setter's name and its arguments.
Setter = tuple[str, tuple[cst.BaseExpression, ...]]
_Reader = Callable[[cst.BaseExpression], "list[Setter] | None"]


def _one(method: str) -> _Reader:
    """The value is the only argument."""
    return lambda value: [(method, (value,))]


def _rules(method: str, length: int) -> _Reader:
    """A list of tuples of ``length``, each the arguments of one call."""

    def read(value: cst.BaseExpression) -> list[Setter] | None:
        rows = _items(value)
        if rows is None:
            return None
        arguments = [_items(row) for row in rows]
        if any(row is None or len(row) != length for row in arguments):
            return None
        return [(method, tuple(row)) for row in arguments if row is not None]

    return read


def _classes(method: str) -> _Reader:
    """A dict of dicts from class to class, by kind; only static quantization, the default."""

    def read(value: cst.BaseExpression) -> list[Setter] | None:
        kinds = string_keys(value)
        if kinds is None or set(kinds) - {"static"}:
            return None
        pairs = _pairs(kinds.get("static", cst.Dict([])))
        return None if pairs is None else [(method, pair) for pair in pairs]

    return read


#: By class: what each key of its dict is translated to, in the order of the calls.
KEYS: dict[str, dict[str, _Reader]] = {
    "QConfigMapping": {
        "": _one("set_global"),
        "object_type": _rules("set_object_type", 2),
        "module_name_regex": _rules("set_module_name_regex", 2),
        "module_name": _rules("set_module_name", 2),
        "module_name_object_type_order": _rules("set_module_name_object_type_order", 4),
    },
    "PrepareCustomConfig": {
        "float_to_observed_custom_module_class": _classes("set_float_to_observed_mapping"),
        "non_traceable_module_name": _one("set_non_traceable_module_names"),
        "non_traceable_module_class": _one("set_non_traceable_module_classes"),
        "input_quantized_idxs": _one("set_input_quantized_indexes"),
        "output_quantized_idxs": _one("set_output_quantized_indexes"),
        "preserved_attributes": _one("set_preserved_attributes"),
    },
    "ConvertCustomConfig": {
        "observed_to_quantized_custom_module_class": _classes("set_observed_to_quantized_mapping"),
        "preserved_attributes": _one("set_preserved_attributes"),
    },
    "FuseCustomConfig": {"preserved_attributes": _one("set_preserved_attributes")},
}


def setters(cls: str, value: cst.Dict) -> list[Setter] | None:
    """The calls that say what the dict says; None where that is not possible.

    >>> dict_config = cst.parse_expression('{"": q, "module_name": [("fc", None)]}')
    >>> [method for method, _ in setters("QConfigMapping", dict_config)]
    ['set_global', 'set_module_name']
    """
    entries = string_keys(value)
    if entries is None or cls not in KEYS or m.findall(value, m.Comment()):
        return None
    found: list[Setter] = []
    for key, entry in entries.items():
        read = KEYS[cls].get(key)
        calls = None if read is None else read(entry)
        if calls is None:
            return None
        found += calls
    return found


def string_keys(value: cst.BaseExpression) -> dict[str, cst.BaseExpression] | None:
    """The entries of a dict literal whose keys are different string literals, else None.

    >>> string_keys(cst.parse_expression("{key: 1}")) is None
    True
    """
    pairs = _pairs(value)
    if pairs is None:
        return None
    entries: dict[str, cst.BaseExpression] = {}
    for key, entry in pairs:
        name = key.evaluated_value if isinstance(key, cst.SimpleString) else None
        if not isinstance(name, str) or name in entries:
            return None
        entries[name] = entry
    return entries


def _pairs(value: cst.BaseExpression) -> list[tuple[cst.BaseExpression, cst.BaseExpression]] | None:
    if not isinstance(value, cst.Dict):
        return None
    pairs = [(e.key, e.value) for e in value.elements if isinstance(e, cst.DictElement)]
    return pairs if len(pairs) == len(value.elements) else None


def _items(value: cst.BaseExpression) -> list[cst.BaseExpression] | None:
    """The items of a list or tuple literal without unpacking."""
    if not isinstance(value, (cst.List, cst.Tuple)):
        return None
    items = [e.value for e in value.elements if isinstance(e, cst.Element)]
    return items if len(items) == len(value.elements) else None


def chain(cls: str, calls: Sequence[Setter], indent: str | None) -> cst.BaseExpression:
    """``cls().set_a(…).set_b(…)``; with ``indent`` one call a line, that far in.

    >>> calls = [("set_global", (cst.parse_expression("q"),))]
    >>> cst.Module([]).code_for_node(chain("QConfigMapping", calls, None))
    'QConfigMapping().set_global(q)'
    """
    before: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace("")
    if indent is not None:
        before = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indent))
    result = cst.parse_expression(f"{cls}()")
    for method, arguments in calls:
        dot = cst.Dot(whitespace_before=before)
        result = cst.Call(cst.Attribute(result, cst.Name(method), dot=dot), _arguments(arguments))
    return result


def _arguments(values: Sequence[cst.BaseExpression]) -> list[cst.Arg]:
    comma: Any = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = len(values) - 1
    return [
        cst.Arg(value, comma=comma if i < last else cst.MaybeSentinel.DEFAULT)
        for i, value in enumerate(values)
    ]
