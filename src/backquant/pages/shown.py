"""What results have in common that people read."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from backquant.files import write_text
from backquant.pages.document import Document


class Shown(ABC):
    """A result that says its ``document``: print it, or save it as a page or as Markdown."""

    @abstractmethod
    def document(self) -> Document:
        """What a person reads of it."""

    def render(self, *, width: int = 140, color: bool = False) -> str:
        """As text; tables have at most ``width`` columns."""
        from backquant.pages.text import render

        return render(self.document(), width=width, color=color)

    def __str__(self) -> str:
        return self.render()

    def to_html(self) -> str:
        """One self-contained page that works offline."""
        from backquant.pages.html import to_html

        return to_html(self.document())

    def to_markdown(self) -> str:
        """The same as Markdown, without figures."""
        from backquant.pages.markdown import to_markdown

        return to_markdown(self.document())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page to ``path`` (under a temporary name first); ``UsageError`` where it cannot be."""
        write_text(path, self.to_html(), "save_html(path)")

    def save_markdown(self, path: str | os.PathLike[str]) -> None:
        """Write the Markdown to ``path`` likewise."""
        write_text(path, self.to_markdown(), "save_markdown(path)")
