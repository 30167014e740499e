"""JSON that others wrote: whatever is wrong with the text is a ``ValueError``."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def read_json(text: str | bytes, *, strict: bool = True) -> Any:
    """The data in ``text``. A ``ValueError`` for what is no JSON, for an object that has a key twice (readers
    would not agree which one counts), and for lists in lists beyond Python's limit of recursion.

    >>> read_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> read_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' stands twice in one object
    >>> read_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(text, strict=strict, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {ascii(twice)[:80]} stands twice in one object")
    return entries
