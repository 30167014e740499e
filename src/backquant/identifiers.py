"""Names that graphs can hold: ASCII identifiers, since ``torch.fx`` writes them into Python source.

``nn.Module`` takes any text as the name of a module, parameter or buffer. In source a keyword or a quote is a
syntax error, and Python compares identifiers after NFKC normalisation: µ and μ would be one attribute.

1. A plain name is an ASCII identifier, no keyword, and begins neither with two underscores nor with
   ``PREFIX``. Plain names stay as they are.
2. Any other name is written as ``PREFIX`` and its characters: letters and digits as they are, an underscore
   twice, others as their code point between underscores. So no two names become one, and ``label`` gives the
   user's own back.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Iterable
from typing import Any, TypeVar

PREFIX = "bqname_"
_ASCII_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(rf"{PREFIX}[A-Za-z0-9_]*")
_Data = TypeVar("_Data")
_CHARACTER = re.compile(r"__|_([0-9a-f]{1,5}|10[0-9a-f]{4})_|([A-Za-z0-9])")


def is_identifier(name: object) -> bool:
    """Whether ``name`` can stand in source as an attribute or argument, and means itself there.

    >>> [is_identifier(name) for name in ("conv1", "in", "µ", "a b", "ｆｏｒｗａｒｄ", "0", "")]
    [True, False, False, False, False, False, False]
    """
    return (
        isinstance(name, str)
        and _ASCII_IDENTIFIER.fullmatch(name) is not None
        and not keyword.iskeyword(name)
    )


def identifier(name: str) -> str:
    """``name`` if it is plain or a number, as in ``nn.Sequential``; otherwise a plain name for it alone.

    >>> [identifier(name) for name in ("conv1", "0", "in", "a_b c", "µ", "μ", "__x")]
    ['conv1', '0', 'bqname_in', 'bqname_a__b_20_c', 'bqname__b5_', 'bqname__3bc_', 'bqname_____x']
    """
    is_index = name.isascii() and name.isdecimal()
    if is_index or (is_identifier(name) and not name.startswith(("__", PREFIX))):
        return name
    return PREFIX + "".join(map(_written, name))


def _written(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return "__" if character == "_" else f"_{ord(character):x}_"


def label(path: str) -> str:
    """The user's own names of a path of plain ones.

    >>> label("heads.bqname__b5_.0"), label("layers.0.weight")
    ('heads.µ.0', 'layers.0.weight')
    """
    if PREFIX not in path:
        return path
    return ".".join(map(_label, path.split(".")))


def labelled(text: str) -> str:
    """``text`` with the user's own names for those that ``identifier`` wrote, to be read: what cannot be
    printed in a line is escaped.

    >>> labelled("heads_bqname_in: module 'heads.bqname_in' is float")
    "heads_in: module 'heads.in' is float"
    """
    return _PLAIN.sub(lambda match: _shown(_label(match[0])), text) if PREFIX in text else text


def labelled_data(data: _Data) -> _Data:
    """``data`` of dataclasses, tuples, lists and dicts with ``labelled`` texts.

    >>> labelled_data({"bqname_in": ("heads.bqname_in", 1)})
    {'in': ('heads.in', 1)}
    """
    return _labelled_data(data)  # type: ignore[no-any-return]


def _labelled_data(data: Any) -> Any:
    if isinstance(data, str) and type(data) is str:
        return labelled(data)
    if isinstance(data, dict):
        return type(data)((_labelled_data(k), _labelled_data(v)) for k, v in data.items())
    if type(data) in (tuple, list):
        return type(data)(map(_labelled_data, data))
    if not dataclasses.is_dataclass(data) or isinstance(data, type):
        return data
    before = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    after = {name: _labelled_data(value) for name, value in before.items()}
    changed = {name: value for name, value in after.items() if value != before[name]}
    return dataclasses.replace(data, **changed) if changed else data


def _shown(name: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def _label(name: str) -> str:
    if not name.startswith(PREFIX):
        return name
    own = _CHARACTER.sub(_read, name.removeprefix(PREFIX))
    return own if identifier(own) == name else name


def _read(match: re.Match[str]) -> str:
    code, plain = match.groups()
    return plain or ("_" if code is None else chr(int(code, 16)))


def identifiers(names: Iterable[str]) -> str:
    """A path of these names, from the outermost.

    >>> identifiers(["heads", "in"])
    'heads.bqname_in'
    """
    return ".".join(map(identifier, names))
