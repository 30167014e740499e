"""What people read: a document is data; text for a terminal, Markdown and HTML follow from it."""

from __future__ import annotations

from backquant.pages.document import (
    Box,
    Card,
    Cell,
    Column,
    Document,
    Drawing,
    Graph,
    Items,
    Listing,
    Note,
    Part,
    Row,
    Section,
    Table,
    Term,
    Terms,
    letters_of,
)
from backquant.pages.html import Shown

__all__ = [
    "Box",
    "Card",
    "Cell",
    "Column",
    "Document",
    "Drawing",
    "Graph",
    "Items",
    "Listing",
    "Note",
    "Part",
    "Row",
    "Section",
    "Shown",
    "Table",
    "Term",
    "Terms",
    "letters_of",
]
