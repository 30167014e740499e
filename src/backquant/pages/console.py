"""The only console that prints: whatever is shown, no name in it reaches a terminal as a command."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from backquant.errors import printable


class SafeConsole(Console):
    """rich's console whose texts are ``printable``, and no markup; styles and movements of rich's own stay.

    >>> import io
    >>> SafeConsole(file=(shown := io.StringIO()), highlight=False).print("\\x1b]0;title", end="")
    >>> shown.getvalue()
    '\\\\x1b]0;title'
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=printable(part.text))
