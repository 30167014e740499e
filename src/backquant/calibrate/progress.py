"""How far calibration is: any callable, or a bar on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from typing_extensions import Self


class Progress(Protocol):
    """Called after every batch that was measured."""

    def __call__(self, done: int, total: int | None) -> None:
        """``done`` batches of ``total`` (None: unknown)."""


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """On a terminal: that something goes on, and for how long, on standard error; gone at the end.

    >>> with spinner("exporting"):
    ...     pass
    """
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    target = Console(stderr=True)
    quiet = not target.is_terminal
    with RichProgress(*columns, console=target, transient=True, disable=quiet) as shown:
        shown.add_task(title, total=None)
        yield


class ProgressBar:
    """A bar on standard error (rich), shown while the ``with`` block lasts.

    >>> with ProgressBar("calibrating", quiet=True) as progress:
    ...     progress(1, 2)
    """

    def __init__(self, title: str = "calibrating", *, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._done = 0
        self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:  # what ended before its estimate is done
            self._bar.update(self._task, completed=self._done, total=self._done)
        self._bar.stop()

    def __call__(self, done: int, total: int | None) -> None:
        self._done = done
        self._bar.update(self._task, completed=done, total=total)
