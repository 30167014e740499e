"""Names of PyTorch's quantization inside of strings: patches, registries, quoted annotations."""

from __future__ import annotations

import re

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.decisions import Decisions
from backquant.migrate.local_names import Local
from backquant.migrate.resolve import Fate, fate, name_in

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_KIND = "name in a string"
_UNREAD = "a name in a string is not rewritten: what reads it is not known"
_ANNOTATION = "a name in an annotation in quotes is not rewritten"


def report_strings(decisions: Decisions) -> None:
    """Report strings that are nothing but the dotted name of something that is migrated, and
    annotations in quotes that name such a thing by a local name.

    What the string is used for (``importlib``, ``mock.patch``, a registry) is not known, so it stays.
    """
    seen = {quote for local in decisions.names.locals for quote in local.quotes}
    for local in decisions.names.locals:
        for quote in local.quotes:
            _report_annotation(decisions, local, quote)
    for node in decisions.names.parents:
        value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
        if isinstance(value, str) and node not in seen and _DOTTED.fullmatch(value):
            use = fate(value)
            if use is not None:
                decisions.report(node, value, ByHand(_KIND, _UNREAD, _way_out(use)))


def _report_annotation(decisions: Decisions, local: Local, quote: cst.BaseString) -> None:
    """Names that go through a module or package; one that is imported itself stays as it is."""
    path = local.bindings[0].path
    text = quote.evaluated_value if isinstance(quote, cst.SimpleString) else None
    for name in _DOTTED.findall(text if isinstance(text, str) else ""):
        first, _, rest = name.partition(".")
        use = fate(f"{path}.{rest}") if first == local.name else None
        own = fate(path)
        if use is None or (own is not None and not own.is_module):
            continue
        if own is not None and _stays(decisions, local, use, own, rest):
            continue
        decisions.report(quote, name, ByHand(_KIND, _ANNOTATION, _way_out(use)))


def _stays(decisions: Decisions, local: Local, use: Fate, module: Fate, rest: str) -> bool:
    """Whether the local name now stands for a module in which the rest is still right."""
    aliases = [binding.alias for binding in local.bindings if binding.alias is not None]
    specs = [decisions.changes.aliases.get(alias) for alias in aliases]
    if module.target is None or any(spec is None or spec.local != local.name for spec in specs):
        return False
    taken = use.length - len(local.bindings[0].path.split("."))
    said = ".".join(rest.split(".")[:taken])
    return use.target is not None and name_in(module.target, use.target) == said


def _way_out(use: Fate) -> str:
    if use.target is not None:
        return f"write {use.target!r}"
    assert use.by_hand is not None
    return use.by_hand.how
