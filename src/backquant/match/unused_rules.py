"""Rules of a QConfigMapping that applied to no node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backquant.errors import did_you_mean
from backquant.graph import Scope
from backquant.identifiers import label
from backquant.match.plan import Decision, Fusion, RuleKind, RuleRef
from backquant.match.rules import RuleTable


def unused_rules(
    table: RuleTable,
    decisions: Mapping[str, Decision],
    scopes: Mapping[str, Scope],
    fusions: Iterable[Fusion] = (),
) -> tuple[tuple[RuleRef, ...], tuple[str, ...]]:
    """Rules that applied to no node; and notes on those that probably have a mistake in them.

    >>> from backquant.qconfig import QConfigMapping
    >>> table = RuleTable(QConfigMapping().set_module_name("decodr", None))
    >>> unused_rules(table, {}, {"relu": Scope("decoder", None)})[1]
    ('module_name "decodr" matches no module (did you mean "decoder"?)',)
    """
    used = {decision.rule for decision in decisions.values()}
    unused = tuple(rule for rule in table.rules if rule not in used)
    paths = _module_paths(scopes)
    fused = _fused_into(scopes, fusions)
    notes = (_note(rule, table, paths, fused) for rule in unused)
    return unused, tuple(note for note in notes if note)


def _module_paths(scopes: Mapping[str, Scope]) -> dict[str, None]:
    paths: dict[str, None] = {}
    for scope in scopes.values():
        path = label(scope.path)
        while path and path not in paths:
            paths[path] = None
            path = path.rpartition(".")[0]
    return paths


def _fused_into(scopes: Mapping[str, Scope], fusions: Iterable[Fusion]) -> dict[str, str]:
    into: dict[str, str] = {}
    for fusion in fusions:
        root = scopes.get(fusion.root)
        for name in fusion.nodes:
            scope = scopes.get(name)
            if root is not None and scope is not None and name != fusion.root:
                into[label(scope.path)] = label(root.path)
    return into


def _note(rule: RuleRef, table: RuleTable, paths: dict[str, None], fused: dict[str, str]) -> str:
    target = table.targets[rule]
    if rule.kind is RuleKind.MODULE_NAME_REGEX:
        return f'module_name_regex "{target}" applies to no module'
    if rule.kind is RuleKind.OBJECT_TYPE:
        return ""
    name = label(target if rule.kind is RuleKind.MODULE_NAME else target[0])
    text = f'{rule.kind.value} "{rule.key}"'
    if name in fused:
        return f'{text} does nothing: "{name}" became a part of "{fused[name]}"'
    if name and name not in paths:
        meant = did_you_mean(name, paths, most=2, quote='"{}"'.format)
        return f"{text} matches no module" + (f" ({meant})" if meant else "")
    return f"{text} applies to no operator"
