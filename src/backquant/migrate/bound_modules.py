"""Modules of ``torch.ao`` with a local name: ``from torch.ao.quantization import quantize_fx``."""

from __future__ import annotations

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.changes import Spec
from backquant.migrate.decisions import AMBIGUOUS, DYNAMIC, Decisions, fate_of
from backquant.migrate.local_names import Local, Use
from backquant.migrate.resolve import Fate, fate, name_in

_Fates = dict[Use, "Fate | None"]


def decide_module(decisions: Decisions, local: Local) -> None:
    """1. Something needs a person: the import stays, the rest is spelled from ``backquant``.
    2. The local name was chosen or is needed: it stands for the new module. 3. Else it goes.
    """
    paths = [binding.path for binding in local.bindings]
    places = {None if (module := fate(path)) is None else module.target for path in paths}
    place = next(iter(places))
    found = {use: fate_of(paths, use) for use in local.uses if use.attributes}
    values = [u for u in local.uses if not u.attributes and not _is_tested(decisions, u)]
    if place is None or len(places) > 1 or values or any(map(_needs_a_person, found.values())):
        _split(decisions, local, found)
        for use in values:
            decisions.report(use.nodes[0], paths[0], DYNAMIC)
    elif _keeps_name(decisions, local, place):
        _rename(decisions, local, place, found)
    else:
        for binding in local.bindings:
            assert binding.alias is not None
            decisions.changes.aliases[binding.alias] = decisions.root_spec
        for use, use_fate in found.items():
            assert use_fate is not None
            decisions.respell(local, use, use_fate, decisions.from_root)


def _needs_a_person(found: Fate | None) -> bool:
    return found is None or found.by_hand is not None


def _is_tested(decisions: Decisions, use: Use) -> bool:
    """Whether a module used as a value is only asked for: ``if tq:``, ``tq is None``, ``not tq``."""
    node = use.nodes[0]
    parent = decisions.names.parents.get(node)
    if isinstance(parent, (cst.Comparison, cst.BooleanOperation)):
        return True
    if isinstance(parent, cst.UnaryOperation):
        return isinstance(parent.operator, cst.Not)
    return getattr(parent, "test", None) is node


def _keeps_name(decisions: Decisions, local: Local, place: str) -> bool:
    names = decisions.names
    last = local.bindings[0].path.rpartition(".")[2]
    chosen = any(binding.renamed for binding in local.bindings) and local.name != last
    reads = {use.nodes[0] for use in local.uses}
    elsewhere = any(node not in reads for node in names.mentioned(local))
    bare = not local.uses or any(not use.attributes for use in local.uses)
    said = local.name in names.strings or local.quoted
    same = place.rpartition(".")[2] == local.name
    return chosen or elsewhere or bare or said or same or local.other


def _rename(decisions: Decisions, local: Local, place: str, found: _Fates) -> None:
    """Import ``place`` under the local name; respell what has another name there."""
    module, _, name = place.rpartition(".")
    for binding in local.bindings:
        assert binding.alias is not None
        plain = isinstance(binding.statement, cst.Import) or not module
        spec = Spec(place, "", local.name) if plain else Spec(module, name, local.name)
        decisions.changes.aliases[binding.alias] = spec

    def spelled(target: str) -> str:
        inside = name_in(place, target)
        if inside is not None:
            return f"{local.name}.{inside}"
        decisions.add_root(local.bindings)
        return decisions.from_root(target)

    for use, use_fate in found.items():
        assert use_fate is not None
        decisions.respell(local, use, use_fate, spelled)


def _split(decisions: Decisions, local: Local, found: _Fates) -> None:
    path = local.bindings[0].path
    for use, use_fate in found.items():
        if use_fate is None or local.other:
            why: ByHand = AMBIGUOUS
            if use_fate is not None and use_fate.by_hand is not None:
                why = use_fate.by_hand
            decisions.report(use.nodes[0], ".".join([path, *use.attributes]), why)
        elif use_fate.by_hand is not None:
            decisions.report_use(path, use, use_fate)
        else:
            decisions.respell(local, use, use_fate, decisions.from_root)
            decisions.add_root(local.bindings)
