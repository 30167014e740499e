"""Names of PyTorch's quantization inside of strings: patches, registries, quoted annotations."""

from __future__ import annotations

import re

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.decisions import Decisions
from backquant.migrate.resolve import fate

__all__ = ["report_strings"]

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def report_strings(decisions: Decisions) -> None:
    """Report strings that are nothing but the dotted name of something that is migrated.

    What the string is used for (``importlib``, ``mock.patch``, a registry) is not known, so it stays.
    """
    for node in decisions.names.parents:
        value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
        if not isinstance(value, str) or not _DOTTED.fullmatch(value):
            continue
        use = fate(value)
        if use is None:
            continue
        how = f"write {use.target!r}" if use.target else use.by_hand.how if use.by_hand else ""
        why = "a name in a string is not rewritten: what reads it is not known"
        decisions.report(node, value, ByHand("name in a string", why, how))
