"""Names that are imported one by one: ``from torch.ao.quantization import QConfig``."""

from __future__ import annotations

from dataclasses import replace

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.decisions import AMBIGUOUS, Decisions, Resolved, spec_for
from backquant.migrate.local_names import Binding, Local
from backquant.migrate.names import PRIVATE, RENAMED_CALLS
from backquant.migrate.resolve import Fate, fate

_NOT_CALLED = ByHand(
    "old functions",
    "the function gave a dict, and is passed on here instead of being called",
    "pass lambda backend: backquant.get_default_qconfig_mapping(backend).to_dict()",
)


def decide_name(decisions: Decisions, local: Local) -> None:
    """Import the name from backquant; its uses stay, unless it is called otherwise there."""
    fates = {binding: fate(binding.path) for binding in local.bindings}
    for binding, found in fates.items():
        if found is None:
            _report(decisions, local, binding, AMBIGUOUS)
        elif found.by_hand is not None:
            _report(decisions, local, binding, found.by_hand)
    known = [found for found in fates.values() if found is not None and found.target is not None]
    if not known:
        return
    new_name = _new_name(decisions, local, known)
    if new_name is None:
        _report(decisions, local, local.bindings[0], _NOT_CALLED)
        return
    for binding, found in fates.items():
        if found is not None and found.target is not None:
            assert binding.alias is not None
            spec = spec_for(binding.path, found.target, new_name)
            decisions.changes.aliases[binding.alias] = spec
    if {found.target for found in known} == {known[0].target} and len(known) == len(fates):
        _resolve(decisions, local, known[0], new_name)


def _new_name(decisions: Decisions, local: Local, known: list[Fate]) -> str | None:
    """The local name from now on; None where a renamed function cannot be told from its calls."""
    target = known[0].target
    assert target is not None
    symbol, name = known[0].symbol, target.rpartition(".")[2]
    if symbol in RENAMED_CALLS and not all(_is_called(decisions, u.nodes[0]) for u in local.uses):
        return None
    if symbol not in RENAMED_CALLS and symbol not in PRIVATE:
        return local.name
    reads = {use.nodes[0] for use in local.uses}
    elsewhere = [node for node in decisions.names.mentioned(local) if node not in reads]
    chosen = any(binding.renamed for binding in local.bindings)
    said = local.name in decisions.names.strings or local.quoted
    usable = decisions.is_free(name) or all(decisions.sees(node, name, target) for node in reads)
    if elsewhere or chosen or said or local.other or not usable:
        return local.name
    return name


def _is_called(decisions: Decisions, node: cst.CSTNode) -> bool:
    parent = decisions.names.parents.get(node)
    return isinstance(parent, cst.Call) and parent.func is node


def _resolve(decisions: Decisions, local: Local, found: Fate, new_name: str) -> None:
    statements = [binding.statement for binding in local.bindings]
    for use in local.uses:
        node = use.nodes[0]
        if new_name != local.name:
            decisions.changes.edit(node, lambda updated: updated.with_changes(value=new_name))
        decisions.resolved.append(Resolved(node, found, decisions.speller(statements, node)))


def _report(decisions: Decisions, local: Local, binding: Binding, why: ByHand) -> None:
    """At every use; at the import where there is none, which then holds nothing back."""
    assert binding.alias is not None
    for use in local.uses:
        decisions.report(use.nodes[0], binding.path, why)
    if not local.uses:
        decisions.report(binding.alias, binding.path, replace(why, holds=False))
