"""How far calibration is: any callable, or a bar on the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from typing_extensions import Self


class Progress(Protocol):
    """Called after every batch that was measured."""

    def __call__(self, done: int, total: int | None) -> None:
        """``done`` batches of ``total`` (None: unknown)."""


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
