"""Packages above PyTorch's quantization: ``import torch``, ``from torch import nn``."""

from __future__ import annotations

from backquant.migrate.changes import Spec
from backquant.migrate.decisions import AMBIGUOUS, Decisions, fate_of
from backquant.migrate.local_names import Local
from backquant.migrate.resolve import Fate, canonical, fate


def decide_package(decisions: Decisions, local: Local) -> None:
    """Spell uses that go into ``torch.ao`` from ``backquant``; drop imports without a use left.

    ``import torch.ao.quantization`` binds ``torch``: it goes, or becomes ``import torch``, unless
    a use of it needs a person.
    """
    paths = [binding.path for binding in local.bindings]
    by_hand: list[str] = []
    for use in local.uses:
        found = fate_of(paths, use)
        if found is None:
            continue
        if local.other and found.by_hand is None:
            found = Fate(found.source, found.length, by_hand=AMBIGUOUS)
        if found.by_hand is not None:
            by_hand.append(found.source)
            decisions.report_use(paths[0], use, found)
        else:
            decisions.respell(local, use, found, decisions.from_root)
            decisions.add_root(local.bindings)
    _drop_imports(decisions, local, by_hand)


def _drop_imports(decisions: Decisions, local: Local, by_hand: list[str]) -> None:
    names, changes = decisions.names, decisions.changes
    left = any(node not in decisions.respelled for node in names.mentioned(local))
    used = left or local.quoted or local.name in names.strings
    touched = any(use.nodes[0] in decisions.respelled for use in local.uses)
    for binding in local.bindings:
        assert binding.alias is not None
        ours = fate(binding.imported) is not None
        if ours and any(path.startswith(canonical(binding.imported)) for path in by_hand):
            continue
        if not used and (touched or ours):
            changes.aliases[binding.alias] = decisions.root_spec
        elif ours:
            changes.aliases[binding.alias] = Spec("torch", "", "torch")
