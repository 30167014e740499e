"""The edits of one file, collected first and applied in one walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from backquant.migrate.local_names import ImportStatement

#: From a node whose children are edited already to what stands in its place.
Edit = Callable[[Any], Any]


@dataclass(frozen=True, order=True)
class Spec:
    """One imported name: ``from module import name as local``; ``name`` "" is ``import module``.

    >>> Spec("backquant", "", "backquant")
    Spec(module='backquant', name='', local='backquant')
    """

    module: str
    name: str
    local: str


@dataclass
class Changes:
    """What is to be done with a module.

    ``aliases``: imported names that become others; the rest of their statement stays. ``stars``:
    what a star import becomes. ``added``: names that a statement has to provide in addition.
    ``edits``: replacements of other nodes, first to last.
    """

    aliases: dict[cst.ImportAlias, Spec] = field(default_factory=dict)
    stars: dict[cst.ImportFrom, list[Spec]] = field(default_factory=dict)
    added: dict[ImportStatement, list[Spec]] = field(default_factory=dict)
    edits: dict[cst.CSTNode, list[Edit]] = field(default_factory=dict)

    def add(self, statement: ImportStatement, spec: Spec) -> None:
        """Have ``statement`` import ``spec`` too."""
        specs = self.added.setdefault(statement, [])
        if spec not in specs:
            specs.append(spec)

    def edit(self, node: cst.CSTNode, edit: Edit) -> None:
        """Apply ``edit`` to the node, after the edits that were asked for before."""
        self.edits.setdefault(node, []).append(edit)

    def edit_first(self, node: cst.CSTNode, edit: Edit) -> None:
        """Apply ``edit`` to the node, before the edits that were asked for up to now."""
        self.edits.setdefault(node, []).insert(0, edit)


def applied(module: cst.Module, edits: dict[cst.CSTNode, list[Edit]]) -> cst.Module:
    """The module with every edit applied, children before parents."""
    result = module.visit(_Apply(edits))
    assert isinstance(result, cst.Module)
    return result


class _Apply(cst.CSTTransformer):
    def __init__(self, edits: dict[cst.CSTNode, list[Edit]]) -> None:
        super().__init__()
        self.edits = edits

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        for edit in self.edits.get(original_node, ()):
            updated_node = edit(updated_node)
        return updated_node
