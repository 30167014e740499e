"""``from torch.ao.quantization import *``: the names that are used are imported one by one."""

from __future__ import annotations

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.changes import Spec
from backquant.migrate.decisions import Decisions, Resolved, spec_for
from backquant.migrate.local_names import Binding, Use
from backquant.migrate.resolve import Fate, canonical, fate, name_in
from backquant.migrate.signatures import CONFIGS, SIGNATURES

_UNSEEN = ByHand(
    "star import",
    "which names of this star import are needed, here or in files that import this one, cannot "
    "be seen",
    "import the names that are needed: from backquant import prepare_fx, …",
)
#: The package that backquant has in part: what a star import of it gives cannot be listed.
_PARTIAL = "backquant.nn.quantized"
_ROOT = "torch.ao.quantization"
#: The module of the flow's functions, which the package itself does not give.
_FLOW = "torch.ao.quantization.quantize_fx"
_WITH_THE_FLOW = {*CONFIGS.values(), "backquant.get_tensorrt_backend_config"}
_Found = dict[str, tuple[Fate, list[Use]]]


def decide_stars(decisions: Decisions, *, reexports: bool) -> None:
    """Replace star imports, unless the file is imported by others for what they give.

    A name is imported where the first star import that has it stood. Names that need a person are
    imported by name from where they were; which module but the package itself has them is not
    known, so that a star import of another module then stays.
    """
    stars = [star for star in decisions.names.stars if fate(star.path) is not None]
    by_hand = _report_by_hand(decisions, stars)
    rooted = any(canonical(star.path) == _ROOT for star in stars)
    taken: set[str] = set()
    for star in stars:
        assert isinstance(star.statement, cst.ImportFrom)
        module = fate(star.path)
        assert module is not None
        found = _names(decisions, star.path, module)
        root = canonical(star.path) == _ROOT
        unclear = not module.is_module or module.target == _PARTIAL or (by_hand and not rooted)
        if reexports or unclear or not (found or (root and by_hand)):
            decisions.report(star.statement, f"from {star.path} import *", _UNSEEN)
            continue
        specs = [Spec(star.path, name, name) for name in by_hand] if root else []
        specs += _specs(decisions, star, {n: f for n, f in found.items() if n not in taken})
        taken |= {*found}
        decisions.changes.stars[star.statement] = specs


def _report_by_hand(decisions: Decisions, stars: list[Binding]) -> list[str]:
    """Names that nothing in the file binds and that need a person; each use is reported once."""
    found: dict[str, None] = {}
    for star in stars:
        for name, uses in sorted(decisions.names.unresolved.items()):
            use_fate = fate(f"{star.path}.{name}")
            why = None if use_fate is None else use_fate.by_hand
            if why is None or name not in why.names or name in found:
                continue
            found[name] = None
            for use in uses:
                decisions.report(use.nodes[0], f"{_ROOT}.{name}", why)
    return list(found)


def _names(decisions: Decisions, path: str, module: Fate) -> _Found:
    """Names that nothing in the file binds and that the module has in backquant, with their uses."""
    names: _Found = {}
    for name, uses in sorted(decisions.names.unresolved.items()):
        found = fate(f"{path}.{name}")
        if found is None or found.target is None or found.is_module or name.startswith("_"):
            continue
        if _gives(canonical(path), module, found.target):
            names[name] = (found, uses)
    return names


def _gives(path: str, module: Fate, target: str) -> bool:
    """Whether a star import of the module gives the name, as far as the tables know."""
    if path == _FLOW:
        return target in SIGNATURES or target in _WITH_THE_FLOW
    if path == _ROOT and target in SIGNATURES:
        return False
    return module.target is not None and name_in(module.target, target) is not None


def _specs(decisions: Decisions, star: Binding, found: _Found) -> list[Spec]:
    specs = []
    for name, (use_fate, uses) in found.items():
        assert use_fate.target is not None
        specs.append(spec_for(f"{star.path}.{name}", use_fate.target, name))
        for use in uses:
            spelled = decisions.speller([star.statement], use.nodes[0])
            decisions.resolved.append(Resolved(use.nodes[0], use_fate, spelled))
    return specs
