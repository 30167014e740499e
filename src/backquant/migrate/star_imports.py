"""``from torch.ao.quantization import *``: the names that are used are imported one by one."""

from __future__ import annotations

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.changes import Spec
from backquant.migrate.decisions import Decisions, Resolved, spec_for
from backquant.migrate.local_names import Binding, Use
from backquant.migrate.resolve import Fate, fate

__all__ = ["decide_star"]

_UNSEEN = ByHand(
    "star import",
    "which names of this star import are needed, here or in files that import this one, cannot "
    "be seen",
    "import the names that are needed: from backquant import prepare_fx, …",
)
#: The package that backquant has in part: what a star import of it gives cannot be listed.
_PARTIAL = "backquant.nn.quantized"


def decide_star(decisions: Decisions, star: Binding, *, reexports: bool) -> None:
    """Replace a star import, unless the file is imported by others for what it gives.

    Names that need a person are imported by name from where they were.
    """
    module = fate(star.path)
    if module is None:
        return
    assert isinstance(star.statement, cst.ImportFrom)
    found = _names(decisions, star.path)
    if reexports or not found or not module.is_module or module.target == _PARTIAL:
        decisions.report(star.statement, f"from {star.path} import *", _UNSEEN)
        return
    specs: list[Spec] = []
    for name, (use_fate, uses) in found.items():
        if use_fate.target is None:
            assert use_fate.by_hand is not None
            specs.append(Spec(star.path, name, name))
            for use in uses:
                decisions.report(use.nodes[0], use_fate.source, use_fate.by_hand)
        else:
            specs.append(spec_for(f"{star.path}.{name}", use_fate.target, name))
            for use in uses:
                spelled = decisions.speller([star.statement], use.nodes[0])
                decisions.resolved.append(Resolved(use.nodes[0], use_fate, spelled))
    decisions.changes.stars[star.statement] = specs


def _names(decisions: Decisions, module: str) -> dict[str, tuple[Fate, list[Use]]]:
    """Names that nothing in the file binds and that the module has, with their uses."""
    names: dict[str, tuple[Fate, list[Use]]] = {}
    for name, uses in sorted(decisions.names.unresolved.items()):
        found = fate(f"{module}.{name}")
        if found is None or name.startswith("_"):
            continue
        if found.is_module or (found.by_hand is not None and name not in found.by_hand.names):
            continue
        names[name] = (found, uses)
    return names
