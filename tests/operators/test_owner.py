"""What is true of an operator stands in its record: no other room lists aten overloads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import backquant

SOURCE = Path(backquant.__file__).parent
#: Files that may list overloads, and why.
ALLOWED = {
    "backends/qnnpack_pt2e.py": "a description admits single spellings: PyTorch's has this one",
    "graph/einsum.py": "graph stands below operators: the products that it writes sums of products as",
    "graph/export/leaves.py": "graph stands below operators: the calls that recurrent modules make",
    "graph/export/tidy.py": "what export adds: copies, casts, views that are written to",
    "graph/multiply_adds.py": "torch's flop registry goes by packets, below any spelling",
    "qconfig/derive.py": "qconfig stands below operators: whose weights have the output on axis 1",
    "runtime/replay/pass_on.py": "how recorded calls set storages, no operators of models",
    "runtime/replay/program.py": "what recorded calls hold, in the spelling that the interpreter runs",
}


def _is_overload(value: ast.expr) -> bool:
    """``torch.ops.aten.add.Tensor``, ``_aten.add.Tensor``, ``_aten.add``."""
    names = ast.unparse(value).split(".") if isinstance(value, ast.Attribute) else []
    return any(name in ("aten", "_aten") for name in names[:-1])


def _lists_overloads(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items: list[ast.expr] = node.elts
        elif isinstance(node, ast.Dict):
            items = [key for key in node.keys if key is not None]
        else:
            continue
        yield from (item.lineno for item in items if _is_overload(item))


def test_overloads_are_listed_in_records() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        lines = list(_lists_overloads(ast.parse(path.read_text(encoding="utf-8"))))
        if lines and not name.startswith("operators/"):
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert sorted(found) == sorted(ALLOWED), "a file of ALLOWED lists none any more"
