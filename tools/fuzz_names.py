"""Mutants of names for ``fuzz_artifact.py --names``: one or two labels of a file change, with right digests.

1. What is changed (``_kind``): names of nodes, modules, tensors and attributes, placeholders, keywords of
   calls, what a node calls, names of inputs, aliases (``same_as``), keys of tensors in the file, texts among
   arguments, texts and keys of the rest of the manifest.
2. How it is spelled (``SPELLINGS``): look-alikes that Python normalises (wide letters, superscripts,
   ligatures, µ and μ), combining marks, marks of direction, halves of characters, keywords and attributes of
   Python's own, quotes, line feeds and other marks, the spelling of ``backquant.identifiers``, the look-alike
   of another label, two keys that are one.
3. Where: in that place alone, or in all places that have this label.

None of these changes what is computed: such a file is refused, or has the same results, or its call is
refused. Keys of a dict that a model returns are its data, and may be spelled otherwise.
"""

from __future__ import annotations

import copy
import json
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from backquant.artifact.file import manifest_text, packed
from backquant.identifiers import PREFIX, identifier

Path_ = tuple[Any, ...]
Document = dict[str, Any]


class Twin(str):
    """A key beside an equal one: JSON has both."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class Place:
    """A label of a document: the key at ``path``, or the text there."""

    kind: str
    path: Path_
    is_key: bool
    label: str


def places(document: Document) -> dict[str, list[Place]]:
    """All labels, by what they are."""
    found: dict[str, list[Place]] = {}
    for place in _places(document, ()):
        found.setdefault(place.kind, []).append(place)
    return found


def _places(value: Any, path: Path_) -> Iterator[Place]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield Place(_kind((*path, key), is_key=True), (*path, key), True, key)
            yield from _places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _places(inner, (*path, index))
    elif isinstance(value, str):
        yield Place(_kind(path, is_key=False), path, False, value)


_TABLES = {
    "children": "module",
    "parameters": "tensor of a module",
    "buffers": "tensor of a module",
    "attributes": "attribute",
    "preserved": "attribute",
    "kwargs": "keyword",
    "tensors": "key of a tensor",
    "strides": "key of a tensor",
    "packed": "key of a tensor",
}


def _kind(path: Path_, *, is_key: bool) -> str:
    """What the label at ``path`` is."""
    owner = path[-2] if len(path) > 1 else None
    if is_key:
        return _TABLES.get(owner, "key of the manifest")
    if path[0] != "model":
        return "input" if path[0] in ("interface", "example") else "text of the manifest"
    if path[-1] in ("node", "tensor"):
        return "node" if path[-1] == "node" else "key of a tensor"
    in_graph = "graph" in path and path[-2:-1] != ("graph",)
    named = {"name": "node", "target": "target", "op": "text of a call", "same_as": "alias"}
    if path[-1] in named:
        return named[path[-1]]
    return "text of a call" if in_graph else "text of a module"


# ---- spellings -----------------------------------------------------------------------------------

_WIDE = {ord(c): ord(c) + 0xFEE0 for c in string.printable if "!" <= c <= "~"}
_RAISED = {ord("a"): "ᵃ", ord("e"): "ᵉ", ord("i"): "ⁱ", ord("n"): "ⁿ", ord("s"): "ſ", ord("o"): "º",
           ord("0"): "⁰", ord("1"): "¹", ord("2"): "₂", ord("3"): "³", ord("K"): "\u212a", ord("c"): "ⅽ",
           ord("u"): "ᵘ", ord("x"): "ˣ", ord("_"): "\ufe33", ord("t"): "ᵗ", ord("f"): "ᶠ"}  # fmt: skip
_MATHEMATICAL = {ord(c): chr(0x1D41A + ord(c) - ord("a")) for c in string.ascii_lowercase}
_words = re.compile(r"\S+").findall
_WORDS = _words("""
in class global is lambda None True False def import __class__ __globals__ __init__ __dict__ __getattr__
__call__ __builtins__ __import__ forward self training _modules _parameters _buffers _code graph eval exec
getattr os.system __reduce__ name target output root args kwargs torch device inf nan _bqname_ mro
""")
_MARKS = [
    '"', "'", "\\", "\n", "\r\n", "\t", "\x00", "\x1b[2J", "`", "{x}", "%s", "%n", "$(id)", ");", "]",
    "#", ":", "/", "../", "~", "<script>", "]]>", "\u2028", "\x85", "\ufeff", "a.b", ".", "..", " ",
    "*", "**", ",", ";import os;",
]  # fmt: skip
_DIRECTIONS = [
    "\u202e",
    "\u202d",
    "\u2066",
    "\u2067",
    "\u200f",
    "\u200b",
    "\u200d",
    "\u2060",
    "\u061c",
]
_COMBINING = ["\u0301", "\u0327", "\u20dd", "\u0345", "\ufe0f", "\u0338"]
_HALVES = ["\ud800", "\udc00", "\udcff", "\udbff", "\ud83d\ude00", "\ude00\ud83d", "\U0001f600"]


def look_alike(label: str, dice: random.Random) -> str:
    """A spelling that is the same identifier after NFKC, or nearly: of all characters, or of one."""
    table: Any = dice.choice((_WIDE, _RAISED, _MATHEMATICAL))
    other = (
        label.replace("fi", "\ufb01").replace("\xb5", "\u03bc") if dice.random() < 0.2 else label
    )
    if other != label:
        return other
    if dice.random() < 0.5 or not label:
        return label.translate(table)
    at = dice.randrange(len(label))
    return label[:at] + label[at].translate(table) + label[at + 1 :]


def _with(marks: list[str]) -> Callable[[str, random.Random], str]:
    def spelled(label: str, dice: random.Random) -> str:
        at = dice.randint(0, len(label))
        return label[:at] + dice.choice(marks) + label[at:]

    return spelled


def _word(label: str, dice: random.Random) -> str:
    word = dice.choice(_WORDS)
    word = word.translate(_WIDE) if dice.random() < 0.3 else word
    return dice.choice((word, word, f"{label}.{word}", f"{word}.{label}"))


def _ours(label: str, dice: random.Random) -> str:
    """The spelling of ``backquant.identifiers``, or one that looks like it."""
    odd = dice.choice((label, f"{label} ", look_alike(label, dice), "in"))
    spelled = (
        identifier(odd),
        PREFIX + odd,
        identifier(identifier(odd)),
        f"{PREFIX}_0{ord('a'):x}_",
    )
    return dice.choice(spelled)


def _long(label: str, dice: random.Random) -> str:
    return dice.choice(
        ("", label * 3, label + "x" * 1100, "\u0301" * 70_000, "." * 1000, "1" * 5000)
    )


SPELLINGS: dict[str, Callable[[str, random.Random], str]] = {
    "look-alike": look_alike,
    "combining mark": _with(_COMBINING),
    "direction": _with(_DIRECTIONS),
    "half of a character": _with(_HALVES),
    "word of Python": _word,
    "mark": _with(_MARKS),
    "our spelling": _ours,
    "length": _long,
}


def _spelled(place: Place, others: list[Place], dice: random.Random) -> tuple[str, str]:
    """How, and the other spelling."""
    how = dice.choice((*SPELLINGS, "look-alike", "another", "twin"))
    label = place.label
    if how == "another":
        label = dice.choice(others).label
        spelled = look_alike(label, dice)
        # a reference to another label is another program
        is_itself = spelled == label and not (place.is_key or place.path[-1] == "name")
        return how, f"{label}\u0301" if is_itself else spelled
    if how == "twin":
        return how, Twin(dice.choice(others).label) if place.is_key else look_alike(label, dice)
    return how, SPELLINGS[how](label, dice)


# ---- changes -------------------------------------------------------------------------------------


def _at(value: Any, path: Path_) -> Any:
    for key in path:
        value = value[key]
    return value


def _change_one(document: Document, place: Place, spelled: str) -> None:
    owner, key = _at(document, place.path[:-1]), place.path[-1]
    if not place.is_key:
        owner[key] = spelled
        return
    entries = [(spelled if name is key else name, inner) for name, inner in owner.items()]
    if isinstance(spelled, Twin) and len(entries) > 1:  # both stay, the twin last
        entries = [*owner.items(), (spelled, copy.deepcopy(owner[key]))]
    owner.clear()
    owner.update(_each_kept(entries))


def _each_kept(entries: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object with each of ``entries``: one whose key is there already stays as its twin, as a file can
    have it. Without it nothing is spelled otherwise, but taken away."""
    kept: dict[str, Any] = {}
    for key, inner in entries:
        kept[Twin(key) if key in kept else key] = inner
    return kept


def _change_all(value: Any, label: str, spelled: str) -> Any:
    """``value`` with the other spelling of each key, text, and part of a path."""
    if isinstance(value, dict):
        return _each_kept(
            (_renamed(key, label, spelled), _change_all(inner, label, spelled))
            for key, inner in value.items()
        )
    if isinstance(value, list):
        return [_change_all(inner, label, spelled) for inner in value]
    return _renamed(value, label, spelled) if isinstance(value, str) else value


def _renamed(text: str, label: str, spelled: str) -> str:
    if text == label:
        return spelled
    parts = text.split(".")
    if label not in parts or len(text) > 200:
        return text
    return ".".join(spelled if part == label else part for part in parts)


def change(
    document: Document, tensors: dict[str, torch.Tensor], dice: random.Random
) -> tuple[Document, dict[str, torch.Tensor], str]:
    """The document and its tensors with one label changed, and what was done."""
    known = places(document)
    kind = dice.choice(sorted(known))
    place = dice.choice(known[kind])
    how, spelled = _spelled(place, known[kind], dice)
    everywhere = dice.random() < 0.5 and type(spelled) is str
    done = f"{kind}, {how}, {'all' if everywhere else 'one'}"
    if everywhere:
        document = _change_all(document, place.label, spelled)
    else:
        _change_one(document, place, spelled)
    if kind == "key of a tensor" and dice.random() < 0.8:
        tensors = {spelled if key == place.label else key: t for key, t in tensors.items()}
    return document, tensors, done


def mutant(
    text: str, tensors: dict[str, torch.Tensor], dice: random.Random
) -> tuple[bytes, list[str]]:
    """The bytes of a file, whose digests are right, and what was changed."""
    document, changed, done = json.loads(text), dict(tensors), []
    for _ in range(dice.choice((1, 1, 1, 2))):
        try:
            document, changed, what = change(document, changed, dice)
        except (AttributeError, KeyError, IndexError, TypeError):
            continue  # what an earlier change left cannot be changed so
        done.append(what)
    key = "backquant"
    if dice.random() < 0.01:
        key = look_alike(key, dice)
        done.append("key of the file")
    return _packed(manifest_text(document, changed), changed, key), done


def _packed(manifest: str, tensors: dict[str, torch.Tensor], key: str) -> bytes:
    """A file with keys that JSON can hold, whatever they are: halves of characters, and twins."""
    names = {f"key-of-a-tensor-{place:06}": name for place, name in enumerate(tensors)}
    plain = dict(zip(names, tensors.values(), strict=True))
    data = packed(manifest, plain)
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length].rstrip(), data[8 + length :]
    table, kept = header.split(b'"__metadata__":', 1)
    for stand_in, name in names.items():
        kept = kept.replace(
            f'"{stand_in}":{{"dtype"'.encode(), json.dumps(name).encode() + b':{"dtype"'
        )
    kept = kept.replace(b'{"backquant":', b"{" + json.dumps(key).encode() + b":", 1)
    header = table + b'"__metadata__":' + kept
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + rest
