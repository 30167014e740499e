"""Dicts in the form of PyTorch 1.13, read as the current form.

There a tuple pattern is reversed and nested, and a fuser takes its modules in that order. A
reversed tuple cannot be told from a forward one, so the caller names the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backquant.backend_config.fusers import in_forward_order
from backquant.backend_config.pattern import from_reversed, to_forward
from backquant.errors import SpecError

_VERSIONS = (None, "1.13")


def upgrade(entry: Mapping[str, Any], version: str | None) -> dict[str, Any]:
    """The dict of one entry in the current form.

    With ``version="1.13"``: (1) a reversed sequence becomes a forward one and its fuser is called
    in forward order; (2) any other tuple becomes ``pattern_complex_format``, whose fuser keeps its
    order. The fields that only 1.13 has are those of ``BackendPatternConfig``, where they act.
    Raises ``SpecError`` for an unknown version, or when a 1.13 entry has no pattern.

    >>> upgrade({"pattern": ("relu", "conv")}, "1.13")
    {'pattern': ('conv', 'relu')}
    """
    if version not in _VERSIONS:
        raise SpecError(
            f"no dicts of version {version!r} are known",
            where="version",
            fix='version="1.13" for reversed patterns, no version for the current form',
        )
    current = dict(entry)
    if version is None:
        return current
    if current.get("pattern") is None:
        if current.get("pattern_complex_format") is None:
            raise SpecError("an entry of version 1.13 must contain 'pattern'", where="pattern")
        return current
    pattern = current["pattern"]
    normal = from_reversed(pattern)
    if isinstance(pattern, tuple) and not normal.is_sequential:  # (2)
        del current["pattern"]
        current["pattern_complex_format"] = pattern
    else:  # (1)
        current["pattern"] = to_forward(normal)
        if normal.size > 1 and current.get("fuser_method") is not None:
            current["fuser_method"] = in_forward_order(current["fuser_method"])
    return current
