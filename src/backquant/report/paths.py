"""Many names of one form as one: ``encoder.layers.*.ln_1``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(\d+)")


def collapsed(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers only as one pattern, with ``*`` for the numbers that differ.

    >>> collapsed(["layers.0.ln_1", "layers.1.ln_1", "ln", "layers.2.ln_1"])
    ['layers.*.ln_1', 'ln']
    """
    forms: dict[tuple[str, ...], list[list[str]]] = {}
    for name in dict.fromkeys(names):
        parts = _NUMBER.split(name)
        forms.setdefault(tuple(parts[::2]), []).append(parts)
    return [_pattern(same) for same in forms.values()]


def _pattern(names: Sequence[list[str]]) -> str:
    first = names[0]
    varies = [len({parts[i] for parts in names}) > 1 for i in range(len(first))]
    return "".join("*" if varied else part for part, varied in zip(first, varies, strict=True))


_MOST = 3


def listed(names: Sequence[str], count: int) -> str:
    """A few names as they are; more as patterns, three of them, with the number of operators.

    >>> listed(["a.1", "a.2"], 2), listed(["a.1", "a.2", "b"], 4), listed(list("abcde"), 5)
    ('a.1, a.2', 'a.*, b (4 operators)', 'a, b, c and 2 more (5 operators)')
    """
    if len(names) == count <= _MOST:
        return ", ".join(names)
    patterns = collapsed(names)
    text = ", ".join(patterns[:_MOST])
    if len(patterns) > _MOST:
        text += f" and {len(patterns) - _MOST} more"
    return text if count == 1 else f"{text} ({count} operators)"
