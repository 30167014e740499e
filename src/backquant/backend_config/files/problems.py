"""What is wrong with a spec file: values with file, line and field, and the error that carries them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backquant.errors import SpecError, nearest, quoted

MOST_TOLD = 200  # problems of one file; each may ask for the nearest of thousands of words
_LONGEST = 400  # of what is told of one problem; a file may hold names of any length


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a file.

    >>> print(Problem("x.yaml", 3, "entries[0].patern", "unknown field", 'did you mean "pattern"?'))
    x.yaml:3: entries[0].patern: unknown field; did you mean "pattern"?
    """

    file: str
    line: int | None
    field: str
    message: str
    fix: str = ""

    @property
    def place(self) -> str:
        """``file:line: field``, as far as each is known."""
        file = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (file, _short(self.field)) if part)

    def __str__(self) -> str:
        tail = f"; {self.fix}" if self.fix else ""
        return _short(f"{self.place}: {self.message}{tail}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


class SpecFileError(SpecError):
    """A spec file is malformed. ``problems`` lists everything that was found, in file order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        more = len(self.problems) - 1
        what = _short(first.message) + (f" (and {more} more)" if more else "")
        super().__init__(
            what,
            where="\n         ".join(p.place if p is first else str(p) for p in self.problems),
            fix=_short(first.fix),
        )


def suggestion(word: str, known: Iterable[str]) -> str:
    """A question naming the nearest known word, or the list of known words when none is near.

    >>> suggestion("patern", ["pattern", "root_module"])
    'did you mean "pattern"?'
    >>> suggestion("x", ["pattern", "root_module"])
    'known: pattern, root_module'
    """
    names = list(dict.fromkeys(known))
    starts = [name for name in names if word and name.lower().startswith(word.lower())]
    near = next(iter([*nearest(word, names), *starts]), "")
    if near:
        return f"did you mean {quoted(near)}?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"known: {shown}" if names else ""
