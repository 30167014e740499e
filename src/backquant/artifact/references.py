"""What a manifest refers to is there: tensors, nodes before the node that reads them, modules before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backquant.errors import ArtifactError


def check_references(model: dict[str, Any], tensors: set[str]) -> None:
    """Raise ``ArtifactError`` for a reference in the modules and graphs of ``model`` to what is not there.

    Nodes read nodes before them alone, so that no graph has a cycle.

    >>> graph = [{"op": "output", "name": "output", "args": [{"node": "x"}]}]
    >>> check_references({"graph": graph}, set())
    Traceback (most recent call last):
    backquant.errors.ArtifactError: there is no node 'x' before this one
      where  node output
    """
    seen: set[str] = set()
    stack = [("", model)]
    while stack:
        path, entry = stack.pop()
        if "same_as" in entry:
            _check_named(entry["same_as"], seen, "module", path)
            continue
        seen.add(path)
        for table in ("parameters", "buffers", "attributes", "preserved"):
            values = list(entry.get(table, {}).values())
            _check_values(values, set(), tensors, f"{path} {table}".strip())
        _check_values(entry.get("config"), set(), tensors, path)
        _check_graph(entry.get("graph"), tensors, path)
        children = entry.get("children", {}).items()
        stack += [(f"{path}.{name}".lstrip("."), child) for name, child in reversed(children)]


def _check_graph(rows: list[dict[str, Any]] | None, tensors: set[str], path: str) -> None:
    if rows is None:
        return
    nodes: set[str] = set()
    for row in rows:
        where = f"{path}: node {row['name']}".removeprefix(": ")
        arguments = [row.get("args"), *row.get("kwargs", {}).values()]
        _check_values(arguments, nodes, tensors, where)
        if row["name"] in nodes:
            raise ArtifactError(f"two nodes are called {row['name']!r}", where=where)
        nodes.add(row["name"])
    outputs = [number for number, row in enumerate(rows) if row["op"] == "output"]
    if outputs != [len(rows) - 1]:
        raise ArtifactError("a graph ends with its one output", where=path or "the model")


def _check_values(value: Any, nodes: set[str], tensors: set[str], where: str) -> None:
    for kind, name in _references(value):
        _check_named(name, nodes if kind == "node" else tensors, kind, where)


def _references(value: Any) -> Iterator[tuple[str, str]]:
    """Every ``{"node": name}`` and ``{"tensor": key}`` in a value."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            if len(item) == 1:
                ((key, inner),) = item.items()
                if key in ("node", "tensor") and isinstance(inner, str):
                    yield key, inner
                    continue
            stack += item.values()


def _check_named(name: str, known: set[str], kind: str, where: str) -> None:
    if name not in known:
        before = "" if kind == "tensor" else " before this one"
        raise ArtifactError(f"there is no {kind} {name!r}{before}", where=where)
