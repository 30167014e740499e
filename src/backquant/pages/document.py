"""A document as data: its headline and figures, then parts. ``text``, ``markdown`` and ``html`` write it.

No part holds markup: texts are shown as they are, with any name in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from backquant.pages.markup import Element


@dataclass(frozen=True)
class Card:
    """A figure of the whole: what it is of, its value, a remark. Without a value it is a line; ``share``
    (0 to 1) is drawn below it."""

    name: str
    value: str
    remark: str = ""
    share: float | None = None

    @property
    def words(self) -> str:
        """Value and remark."""
        return " ".join(filter(None, (self.value, self.remark)))


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items:
    """A few short things on one line under a label."""

    label: str
    items: Sequence[str]


@dataclass(frozen=True)
class Listing:
    """Lines under a title that a page unfolds; text has ``label`` before each instead. A list longer than
    ``most`` is left to pages."""

    title: str
    lines: Sequence[str]
    label: str = ""
    most: int | None = None


@dataclass(frozen=True)
class Column:
    """A column of a table. ``kind``: ``"number"`` is aligned to the right, ``"code"`` set as code."""

    name: str
    kind: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell that is more than its text. On pages: ``kind`` colours it, ``tip`` is said when it is pointed
    at, ``node`` is the operator of the graph that it leads to, ``share`` (0 to 1) is drawn as a bar below it,
    ``heat`` (0 to 1) as a mark before it."""

    text: str
    kind: str = ""
    tip: str = ""
    node: str = ""
    share: float | None = None
    heat: float | None = None


@dataclass(frozen=True)
class Row:
    """A row about an operator of the graph; ``state``: by which pages filter, and terminals colour."""

    cells: Sequence[str | Cell]
    node: str = ""
    state: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells; ``\\n`` in a cell begins a line. Columns without any content are left out.

    ``few``: how many rows text shows; it says ``more`` of the others.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    few: int | None = None
    more: str = "more"

    @classmethod
    def of(
        cls,
        heads: str,
        rows: Sequence[Sequence[str | Cell]],
        few: int | None = None,
        more: str = "",
    ) -> Table:
        """A table with ``heads``: names with commas between them; those of numbers begin with ``#``, those
        of code with a backtick.

        >>> Table.of("operator, #SQNR", [("fc", "30 dB")]).columns[1]
        Column(name='SQNR', kind='number')
        """
        kinds = {"#": "number", "`": "code"}
        columns = [Column(head.lstrip("#`"), kinds.get(head[:1], "")) for head in heads.split(", ")]
        return cls(columns, [Row(cells) for cells in rows], few, more or "more")

    @property
    def used(self) -> list[int]:
        """The columns with content; all of them where there are no rows."""
        texts = [[cell_of(cell).text for cell in row.cells] for row in self.rows]
        every = range(len(self.columns))
        return [at for at in every if not texts or any(cells[at] for cells in texts)]


def cell_of(cell: str | Cell) -> Cell:
    """A cell, which may be its text alone."""
    return Cell(cell) if isinstance(cell, str) else cell


@dataclass(frozen=True)
class Term:
    """What a word stands for, with a remark and, for names of operators, where they lead."""

    name: str
    text: str
    remark: str = ""


@dataclass(frozen=True)
class Terms:
    """A title over terms, and over names with what each is (``lists``: a text, and what it holds for).

    ``node``: the operator that the title leads to. In ``lists`` a name is (operator, name, node).
    """

    title: str
    terms: Sequence[Term]
    lists: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = ()
    node: str = ""


@dataclass(frozen=True)
class Box:
    """An operator of a graph: two lines, a colour (``kind``, or ``heat`` from 0 to 1), and the pairs of label
    and text that a click shows; ``kin``: operators that are marked with it."""

    node: str
    title: str
    subtitle: str
    kind: str = ""
    heat: float | None = None
    details: Sequence[tuple[str, str]] = ()
    kin: Sequence[str] = ()


@dataclass(frozen=True)
class Graph:
    """Operators and what each reads; ``first`` is shown first. ``legend``: the kinds of boxes, in words."""

    boxes: Sequence[Box]
    inputs: Mapping[str, Sequence[str]]
    first: str | None = None
    legend: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawing:
    """A figure of a page, with its title and a caption; Markdown and text have neither."""

    element: Element
    title: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """Parts under a title. ``in_text``: text has it, too; ``folded``: a page shows it when it is asked to."""

    title: str
    parts: Sequence[Part]
    in_text: bool = True
    folded: bool = False


Part: TypeAlias = Note | Items | Listing | Table | Terms | Graph | Drawing | Section


@dataclass(frozen=True)
class Document:
    """``title`` and ``about`` name the page, ``headline`` is the first line of text. ``tone``: ``"good"``,
    ``"bad"`` or nothing, for the headline."""

    title: str
    headline: str
    cards: Sequence[Card] = ()
    parts: Sequence[Part] = ()
    about: str = ""
    tone: str = ""


def letters_of(texts: Iterable[str]) -> dict[str, str]:
    """A letter for each text, in order: A … Z, then A2 … Z2, and so on.

    >>> letters_of(["int8", "uint8", "int8"])
    {'int8': 'A', 'uint8': 'B'}
    """
    turns = (divmod(index, 26) for index in count())
    names = (chr(ord("A") + place) + (str(turn + 1) if turn else "") for turn, place in turns)
    return dict(zip(dict.fromkeys(texts), names, strict=False))
