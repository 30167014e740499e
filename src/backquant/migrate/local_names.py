"""Which local names stand for something of PyTorch, and where each is used.

libcst's scope analysis says which assignments a name may refer to. A dotted import (``import
torch.ao.quantization``) is taken for what it does in Python: it binds its first part, ``torch``, in
its own scope. libcst keys it by the dotted name, which a parameter called ``torch`` would not hide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    BuiltinAssignment,
    ExpressionContext,
    ExpressionContextProvider,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

ImportStatement = cst.Import | cst.ImportFrom
_PROVIDERS = (ScopeProvider, ParentNodeProvider, ExpressionContextProvider)


@dataclass(frozen=True, eq=False)
class Binding:
    """An import that binds a local name.

    ``path`` is what the name stands for; ``imported`` what the statement names: they differ for
    ``import torch.nn`` only, which binds ``torch``. ``renamed``: the statement says ``as``.
    """

    statement: ImportStatement
    alias: cst.ImportAlias | None
    path: str
    imported: str
    renamed: bool = False


@dataclass(eq=False)
class Use:
    """A name that is read, with the attributes taken of it.

    ``nodes[0]`` is the name, ``nodes[i]`` the expression with ``i`` attributes. ``stored``: the
    last one is assigned to or deleted.
    """

    local: str
    nodes: list[cst.BaseExpression]
    attributes: list[str]
    stored: bool = False


@dataclass(eq=False)
class Local:
    """One name in one scope: the imports that bind it, its uses, and what else it may be.

    ``other``: something that is no import of PyTorch is assigned to it as well. ``quotes``: the
    annotations in quotes that read it.
    """

    name: str
    scope: Scope
    bindings: list[Binding] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    other: bool = False
    quotes: list[cst.BaseString] = field(default_factory=list)

    @property
    def quoted(self) -> bool:
        return bool(self.quotes)


@dataclass(eq=False)
class Names:
    """The local names that stand for something of PyTorch, and what else a file says of names.

    ``unresolved``: uses of names that nothing in the file binds. ``taken``: all assignments, by
    name. ``mentions``: where a name stands in any scope, imports left out. ``strings``: the values
    of all string literals.
    """

    wrapper: MetadataWrapper
    locals: list[Local]
    stars: list[Binding]
    unresolved: dict[str, list[Use]]
    taken: dict[str, list[Any]]
    mentions: dict[str, list[cst.Name]]
    strings: frozenset[str]
    scopes: dict[cst.CSTNode, Scope | None]
    parents: dict[cst.CSTNode, cst.CSTNode]

    @cached_property
    def positions(self) -> dict[cst.CSTNode, Any]:
        """Where every node stands; looked up late, since many files need none."""
        return dict(self.wrapper.resolve(PositionProvider))

    def line(self, node: cst.CSTNode) -> tuple[int, int]:
        """Line (from 1) and column (from 0) of a node."""
        start = self.positions[node].start
        return start.line, start.column

    def mentioned(self, local: Local) -> list[cst.Name]:
        """Where the name of ``local`` stands in its scope and those inside of it, imports left out.

        More than its uses: names that hide it, and reads in a class body that are not told apart.
        """
        found = self.mentions.get(local.name, ())
        return [node for node in found if _is_inside(self.scopes.get(node), local.scope)]

    def assignments(self, node: cst.Name) -> list[Any]:
        """What may be assigned to the name that ``node`` reads; builtins are left out."""
        return [a for a in _referents(self.scopes, node) if not isinstance(a, BuiltinAssignment)]


def _is_inside(scope: Scope | None, outer: Scope) -> bool:
    while scope is not None and scope is not outer:
        scope = None if scope.parent is scope else scope.parent
    return scope is outer


def names_of(wrapper: MetadataWrapper) -> Names:
    """Look at every import and every name of a module.

    >>> module = cst.parse_module("import torch.nn as nn\\nnn.qat.Linear(3, 4)\\n")
    >>> names = names_of(MetadataWrapper(module))
    >>> [(local.name, local.bindings[0].path, local.uses[0].attributes) for local in names.locals]
    [('nn', 'torch.nn', ['qat', 'Linear'])]
    """
    found: Any = wrapper.resolve_many(_PROVIDERS)
    scopes, parents = dict(found[ScopeProvider]), dict(found[ParentNodeProvider])
    table, taken = _locals(scopes)
    names = Names(
        wrapper=wrapper,
        locals=[local for local in table.values() if local.bindings],
        stars=[star for node in parents if (star := _star(node)) is not None],
        unresolved={},
        taken=taken,
        mentions={},
        strings=_strings(parents),
        scopes=scopes,
        parents=parents,
    )
    _add_uses(names, table, found[ExpressionContextProvider])
    _add_quoted(table, scopes)
    return names


def _strings(nodes: Iterable[cst.CSTNode]) -> frozenset[str]:
    values = (node.evaluated_value for node in nodes if isinstance(node, cst.SimpleString))
    return frozenset(value for value in values if isinstance(value, str))


def _star(node: cst.CSTNode) -> Binding | None:
    """The star import that a node is, when it is one of a package of PyTorch."""
    if not isinstance(node, cst.ImportFrom) or not isinstance(node.names, cst.ImportStar):
        return None
    path = _module_of(node)
    return Binding(node, None, path, path) if path.startswith("torch.") else None


def _module_of(node: cst.ImportFrom) -> str:
    """The module of ``from module import …``; a relative one begins with a dot."""
    name = "" if node.module is None else get_full_name_for_node(node.module) or ""
    return "." * len(node.relative) + name


_Key = tuple[int, str]


def _locals(scopes: Any) -> tuple[dict[_Key, Local], dict[str, list[Any]]]:
    """Every name that an import of PyTorch binds; and all assignments by name."""
    table: dict[_Key, Local] = {}
    taken: dict[str, list[Any]] = {}
    done: set[tuple[int, int]] = set()
    for scope in {id(scope): scope for scope in scopes.values() if scope is not None}.values():
        for assignment in scope.assignments:
            name = assignment.name.split(".")[0]
            local = table.setdefault((id(scope), name), Local(name, scope))
            taken.setdefault(name, []).append(assignment)
            if not isinstance(assignment, ImportAssignment):
                local.other = True
                continue
            for binding in _bindings(assignment.node):
                alias = binding.alias
                if _bound_name(binding) != name or (id(scope), id(alias)) in done:
                    continue
                done.add((id(scope), id(alias)))
                if binding.path == "torch" or binding.path.startswith("torch."):
                    local.bindings.append(binding)
                else:
                    local.other = True
    return table, taken


def _bound_name(binding: Binding) -> str:
    assert binding.alias is not None
    return binding.alias.evaluated_alias or binding.alias.evaluated_name.split(".")[0]


def _bindings(node: Any) -> Iterator[Binding]:
    """The bindings of an import statement."""
    if isinstance(node, cst.Import):
        for alias in node.names:
            name, renamed = alias.evaluated_name, alias.asname is not None
            yield Binding(node, alias, name if renamed else name.split(".")[0], name, renamed)
    elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
        for alias in node.names:
            path = f"{_module_of(node)}.{alias.evaluated_name}"
            yield Binding(node, alias, path, path, alias.asname is not None)


def _referents(scopes: Any, node: cst.Name) -> list[Any]:
    scope = scopes.get(node)
    if scope is None:
        return []
    return list(scope[node.value])


def _add_uses(names: Names, table: dict[_Key, Local], contexts: Any) -> None:
    """Give every local its uses, and collect the names that nothing in the file binds."""
    for node in names.scopes:
        if node not in names.parents:
            continue  # in an annotation in quotes, whose parts are no nodes of the file
        if not isinstance(node, cst.Name) or _is_import(names.parents[node]):
            continue
        names.mentions.setdefault(node.value, []).append(node)
        if contexts.get(node) is ExpressionContext.STORE:
            continue  # no context at all: the bound of a type parameter, which is read
        use = _use(node, names.parents, contexts)
        referents = _referents(names.scopes, node)
        if not referents:
            names.unresolved.setdefault(node.value, []).append(use)
        for key in dict.fromkeys((id(r.scope), node.value) for r in referents):
            if key in table:
                table[key].uses.append(use)


def _is_import(node: cst.CSTNode | None) -> bool:
    return isinstance(node, (cst.ImportAlias, cst.AsName, cst.ImportFrom))


def _use(node: cst.Name, parents: Any, contexts: Any) -> Use:
    nodes: list[cst.BaseExpression] = [node]
    attributes: list[str] = []
    parent = parents.get(node)
    while isinstance(parent, cst.Attribute) and parent.value is nodes[-1]:
        nodes.append(parent)
        attributes.append(parent.attr.value)
        parent = parents.get(parent)
    stored = contexts.get(nodes[-1]) in (ExpressionContext.STORE, ExpressionContext.DEL)
    return Use(node.value, nodes, attributes, stored)


def _add_quoted(table: dict[_Key, Local], scopes: Any) -> None:
    """Give every local the annotations in quotes that read it."""
    for scope in {id(scope): scope for scope in scopes.values() if scope is not None}.values():
        for access in scope.accesses:
            if not isinstance(access.node, cst.BaseString):
                continue
            for referent in access.referents:
                local = table.get((id(referent.scope), referent.name.split(".")[0]))
                if local is not None and access.node not in local.quotes:
                    local.quotes.append(access.node)
