"""What becomes of every local name that stands for something of PyTorch's quantization.

Four cases, by what the name is bound to:

1. a name of ``torch.ao`` (``bound_names``): its import changes, its uses do not;
2. a module of ``torch.ao`` (``bound_modules``): its import changes and keeps the local name where
   that was chosen (``as tq``) or is needed; else its uses are spelled from ``backquant``;
3. a package above, ``torch`` or ``torch.nn`` (``bound_packages``): uses that go into ``torch.ao``
   are spelled from ``backquant``, and the import goes when no other use is left;
4. a star import (``star_imports``): the names that are used are imported one by one.

What needs a person keeps its import, and every use of it is reported.
"""

from __future__ import annotations

import libcst as cst

from backquant.migrate.bound_modules import decide_module
from backquant.migrate.bound_names import decide_name
from backquant.migrate.bound_packages import decide_package
from backquant.migrate.decisions import Decisions
from backquant.migrate.local_names import Local, Names
from backquant.migrate.resolve import fate
from backquant.migrate.star_imports import decide_stars


def decide(names: Names, *, reexports: bool = False) -> Decisions:
    """Decide about every local name. ``reexports``: other files import from this one.

    >>> from libcst.metadata import MetadataWrapper
    >>> from backquant.migrate.local_names import names_of
    >>> code = "from torch.quantization import QConfig, fuse_known_modules\\nfuse_modules(1)\\n"
    >>> decisions = decide(names_of(MetadataWrapper(cst.parse_module(code))))
    >>> [spec.module for spec in decisions.changes.aliases.values()]
    ['backquant']
    >>> [(what, why.kind) for _, what, why in decisions.reported]
    [('torch.quantization.fuse_known_modules', 'fusion by name')]
    """
    decisions = Decisions(names, _free_name(names))
    for local in names.locals:
        {"name": decide_name, "module": decide_module, "package": decide_package}[_kind(local)](
            decisions, local
        )
    decide_stars(decisions, reexports=reexports)
    return decisions


def _kind(local: Local) -> str:
    found = [fate(binding.path) for binding in local.bindings]
    if all(f is None for f in found):
        return "package"
    if any(f is None or not f.is_module for f in found):
        return "name"
    return "module"


def _free_name(names: Names) -> str:
    """``backquant``, or another name where a file uses that one for something else."""
    for name in ("backquant", "bq", "backquant_"):
        assignments = names.taken.get(name, ())
        if name not in names.unresolved and all(_imports_backquant(a, name) for a in assignments):
            return name
    return "_backquant"


def _imports_backquant(assignment: object, name: str) -> bool:
    statement = getattr(assignment, "node", None)
    return isinstance(statement, cst.Import) and any(
        (alias.evaluated_alias or alias.evaluated_name.split(".")[0]) == name
        and alias.evaluated_name.split(".")[0] == "backquant"
        and (alias.asname is None or alias.evaluated_name == "backquant")
        for alias in statement.names
    )
