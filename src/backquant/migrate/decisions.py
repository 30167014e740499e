"""What is decided about a file's names: import changes, uses that were understood, reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.changes import Changes, Spec
from backquant.migrate.local_names import Binding, ImportStatement, Local, Names, Use
from backquant.migrate.names import MODULES
from backquant.migrate.resolve import Fate, canonical, fate, name_in

DYNAMIC = ByHand(
    "dynamic use",
    "the module is used as a value, so which of its names are used cannot be seen",
    "use the names that are needed directly, e.g. backquant.prepare_fx",
)
AMBIGUOUS = ByHand(
    "ambiguous name",
    "this name may be bound to something else as well",
    "give the imports different names",
)
_STORED = ByHand(
    "patched name",
    "PyTorch's module is changed at run time; backquant does not read what is put there",
    "pass the changed object where it is needed, e.g. in a QConfig",
)


@dataclass(frozen=True, eq=False)
class Resolved:
    """A use of a name that backquant has: the expression, and how its neighbours are spelled there.

    ``spelled(target)`` gives the code of another name of backquant at this place, and sees to its
    import.
    """

    node: cst.BaseExpression
    fate: Fate
    spelled: Callable[[str], str]

    @property
    def target(self) -> str:
        assert self.fate.target is not None
        return self.fate.target


@dataclass
class Decisions:
    """Collects what is decided; ``root`` is the name under which ``backquant`` is imported."""

    names: Names
    root: str
    changes: Changes = field(default_factory=Changes)
    resolved: list[Resolved] = field(default_factory=list)
    reported: list[tuple[cst.CSTNode, str, ByHand]] = field(default_factory=list)
    respelled: set[cst.CSTNode] = field(default_factory=set)

    def report(self, node: cst.CSTNode, what: str, why: ByHand) -> None:
        """Leave ``node`` to a person."""
        self.reported.append((node, what, why))

    def report_use(self, path: str, use: Use, found: Fate) -> None:
        """Leave a use to a person, because of what it stands for."""
        assert found.by_hand is not None
        length = min(found.length - len(path.split(".")), len(use.nodes) - 1)
        self.report(use.nodes[length], found.source, found.by_hand)

    @property
    def root_spec(self) -> Spec:
        return Spec("backquant", "", self.root)

    def from_root(self, target: str) -> str:
        """The code of a name of backquant, from the imported package."""
        return self.root + target.removeprefix("backquant")

    def add_root(self, bindings: Iterable[Binding]) -> None:
        """Have the statements of these bindings import backquant."""
        for statement in dict.fromkeys(binding.statement for binding in bindings):
            self.changes.add(statement, self.root_spec)

    def respell(self, local: Local, use: Use, found: Fate, spelled: Callable[[str], str]) -> None:
        """Replace a use, as far as it is a name of PyTorch, by the code of the target."""
        assert found.target is not None
        node = use.nodes[found.length - len(local.bindings[0].path.split("."))]
        code = spelled(found.target)
        self.respelled.add(use.nodes[0])
        self.changes.edit(node, lambda updated: _expression(code, updated))
        self.resolved.append(Resolved(node, found, spelled))

    def speller(
        self, statements: Sequence[ImportStatement], at: cst.CSTNode
    ) -> Callable[[str], str]:
        """Spell names of backquant next to one that ``statements`` import by name."""

        def spelled(target: str) -> str:
            module, _, name = target.rpartition(".")
            if self.sees(at, name, target):
                return name
            free = self.is_free(name)
            spec = Spec(module, name, name) if free else self.root_spec
            for statement in dict.fromkeys(statements):
                self.changes.add(statement, spec)
            return name if free else self.from_root(target)

        return spelled

    def sees(self, at: cst.CSTNode, name: str, target: str) -> bool:
        """Whether ``name``, read at ``at``, is an import of ``target`` by its old or new path."""
        scope = self.names.scopes.get(at)
        assignments = [] if scope is None else list(scope[name])
        reached = {_target(path) for a in assignments for path in _imported_as(a, name)}
        return reached == {target}

    def is_free(self, name: str) -> bool:
        """Whether no scope of the file uses this name."""
        return not self.names.taken.get(name) and name not in self.names.unresolved


def _expression(code: str, instead_of: cst.BaseExpression) -> cst.BaseExpression:
    """The code as an expression, in the parentheses of the one it replaces."""
    expression = cst.parse_expression(code)
    return expression.with_changes(lpar=instead_of.lpar, rpar=instead_of.rpar)


def _imported_as(assignment: object, name: str) -> list[str]:
    """What an assignment imports under ``name``; ``""`` when it is no such import."""
    statement = getattr(assignment, "node", None)
    if not isinstance(statement, cst.ImportFrom) or isinstance(statement.names, cst.ImportStar):
        return [""]
    module = cst.helpers.get_full_name_for_node(statement.module) if statement.module else ""
    return [
        f"{module}.{alias.evaluated_name}"
        for alias in statement.names
        if (alias.evaluated_alias or alias.evaluated_name) == name
    ]


def _target(path: str) -> str | None:
    found = fate(path)
    if found is not None:
        return found.target
    module, _, name = path.rpartition(".")
    return f"backquant.{name}" if name_in(module, f"backquant.{name}") else path


def fate_of(paths: Sequence[str], use: Use) -> Fate | None:
    """What becomes of a use of a name that stands for one of ``paths``.

    1. Outside of PyTorch's quantization: None. 2. Modules used as values, names that are assigned
    to, and names that differ between the paths need a person.
    """
    found = [fate(".".join([path, *use.attributes])) for path in dict.fromkeys(paths)]
    first = found[0]
    if first is None or first.by_hand is not None:
        return first
    taken = {
        (f.target, f.length - len(path.split("."))) if f is not None else None
        for path, f in zip(dict.fromkeys(paths), found, strict=True)
    }
    whole = first.length == len(paths[0].split(".")) + len(use.attributes)
    reason = None
    if len(taken) > 1:
        reason = AMBIGUOUS
    elif use.stored and whole:
        reason = _STORED
    elif first.is_module:
        reason = DYNAMIC
    return first if reason is None else Fate(first.source, first.length, by_hand=reason)


def spec_for(path: str, target: str, local: str) -> Spec:
    """The import of ``target`` instead of ``path``, from the module that stands for the old one.

    >>> spec_for("torch.ao.quantization.observer.MinMaxObserver", "backquant.MinMaxObserver", "M")
    Spec(module='backquant.observe', name='MinMaxObserver', local='M')
    """
    module, _, name = target.rpartition(".")
    place = MODULES.get(canonical(path.rpartition(".")[0]))
    if place is not None and name_in(place, target) == name:
        module = place
    return Spec(module, name, local)
