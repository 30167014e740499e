"""Pages and tables for people: the one place that writes HTML and Markdown.

A page is built of elements, never of text that is pasted together. Elements and attributes are those of
closed lists, without any that loads, runs or submits; a link leads to a place of the same page; a style is a
number.
What a text is made of cannot leave its place: it is escaped when the page is written, and nowhere else.
Scripts and styles are files of this package, which a policy in the page names by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias, Union
from urllib.parse import quote

from backquant.errors import printable

Child: TypeAlias = Union["Element", str, int, float, None]
Attribute: TypeAlias = str | int | float | Mapping[str, float] | None

_words = re.compile(r"[\w-]+").findall
_BLOCKS = frozenset(
    _words(
        "header main footer h1 h2 h3 p div ul li dl dt dd table caption thead tbody tr th td details summary "
        "svg g path polyline line rect circle"
    )
)
_ELEMENTS = _BLOCKS | frozenset(_words("a b i code span small br input button text title"))
_VOID = frozenset({"br", "input"})
_ATTRIBUTES = frozenset(
    _words(
        "class id title role type scope placeholder aria-label aria-hidden aria-pressed data-node data-state "
        "data-from data-to data-width data-height x y x1 y1 x2 y2 cx cy r d points width height viewBox "
        "preserveAspectRatio transform fill-opacity text-anchor"
    )
)
_STYLES = {"width": "%", "flex": "", "opacity": ""}  # with the unit of their number
_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|~#"})


@dataclass(frozen=True)
class Element:
    """An element of HTML or SVG; ``tag`` makes one. Raises ValueError for what is not in the lists."""

    name: str
    children: tuple[Child, ...]
    attributes: tuple[tuple[str, Attribute], ...]

    def __post_init__(self) -> None:
        if self.name not in _ELEMENTS or (self.name in _VOID and self.children):
            raise ValueError(f"no element {self.name!r}")
        for name, value in self.attributes:
            numbers = isinstance(value, Mapping) and all(style in _STYLES for style in value)
            if not (numbers if name == "style" else name == "to" or name in _ATTRIBUTES):
                raise ValueError(f"no attribute {name!r} with {value!r}")

    def written(self) -> Iterator[str]:
        """The element as text of a page, in pieces."""
        yield f"<{self.name}{''.join(f' {_attribute(*pair)}' for pair in self.attributes)}>"
        if self.name in _VOID:
            return
        for child in self.children:
            if isinstance(child, Element):
                yield from child.written()
            elif child is not None:
                yield escaped(child)
        yield f"</{self.name}>" + ("\n" if self.name in _BLOCKS else "")


def tag(name: str, *children: Child, **attributes: Attribute) -> Element:
    """An element. ``class_``, ``data_node``: attributes, with a hyphen for ``_``; ``to``: the id of the
    element that a link leads to; ``style``: numbers by name. Attributes that are None are left out.

    >>> "".join(tag("a", "<b>", to="a b", class_="node").written())
    '<a href="#a%20b" class="node">&lt;b&gt;</a>'
    >>> tag("script", "alert(1)")
    Traceback (most recent call last):
    ValueError: no element 'script'
    """
    spelled = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Element(
        name, children, tuple((key, value) for key, value in spelled if value is not None)
    )


def escaped(text: object) -> str:
    """Text that HTML reads as this text, between elements and in attributes.

    >>> escaped('"<b>"'), escaped("a\\x00")
    ('&quot;&lt;b&gt;&quot;', 'a\\\\x00')
    """
    return html.escape(printable(str(text)), quote=True)


def _attribute(name: str, value: Attribute) -> str:
    if isinstance(value, Mapping):
        value = ";".join(f"{key}:{float(n):g}{_STYLES[key]}" for key, n in value.items())
    elif name == "to":
        name, value = "href", "#" + quote(printable(str(value)))
    return f'{name}="{escaped(value)}"'


def table(heads: Iterable[Child], rows: Iterable[Element], caption: str | None = None) -> Element:
    """A table with one row of heads (texts, or whole ``th`` elements).

    >>> "".join(table(["a"], []).written()).replace("\\n", "")
    '<table><thead><tr><th>a</th></tr></thead><tbody></tbody></table>'
    """
    cells = (head if isinstance(head, Element) else tag("th", head) for head in heads)
    title = [] if caption is None else [tag("caption", caption)]
    return tag("table", *title, tag("thead", tag("tr", *cells)), tag("tbody", *rows))


@dataclass(frozen=True)
class Assets:
    """Files of the package beside a page: ``styles`` and a ``script`` that reads ``data`` as JSON."""

    room: str
    styles: tuple[str, ...]
    script: str = ""
    data: Any = None


def page(title: str, assets: Assets, *body: Element) -> str:
    """A page that needs no network, and on which nothing runs but the script of ``assets``.

    >>> text = page("<x>", Assets("pages", ("page.css",)), tag("p", "</script>"))
    >>> "script-src 'none'" in text, "<title>&lt;x&gt;</title>" in text, "&lt;/script&gt;" in text
    (True, True, True)
    """
    styles = "".join(_asset(assets.room, name) for name in assets.styles)
    script = _asset(assets.room, assets.script) if assets.script else ""
    runs = f"'sha256-{_digest(script)}'" if script else "'none'"
    # numbers in attributes (``style``) have no digest; nothing that a style can do leaves the page
    rest = "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    policy = f"default-src 'none'; script-src {runs}; {rest}"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f"<title>{escaped(title)}</title>\n<style>\n{styles}</style>\n</head>\n<body>\n",
        *(piece for element in body for piece in element.written()),
    ]
    if script:
        data = f'<script type="application/json" id="data">{_script_json(assets.data)}</script>\n'
        parts += [data, f"<script>{script}</script>\n"]
    return "".join((*parts, "</body>\n</html>\n"))


def _asset(room: str, name: str) -> str:
    place = resources.files("backquant")
    for part in (*room.split("."), name):
        place = place / part
    return place.read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _script_json(value: Any) -> str:
    """JSON without a character that could end the element, with the names that the page shows."""
    text = json.dumps(_printable(value), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, (list, tuple)) else value


def markdown(text: str) -> str:
    """Text of one line in which Markdown and HTML find no markup, in a cell of a table, too.

    >>> print(markdown("a|b_c*\\n<b>[x](javascript:1)"))
    a\\|b\\_c\\* &lt;b&gt;\\[x\\](javascript:1)
    """
    return html.escape(" ".join(printable(text).split()), quote=False).translate(_MARKS)
