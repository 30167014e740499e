"""What is true of an operator stands in its record: other rooms name no aten overloads of their own.

A pass writes an operator, or looks for one, by its name (``backquant.operators.overload``, ``overloads``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.tree_figures import names_overload

import backquant

SOURCE = Path(backquant.__file__).parent
#: Files that name overloads, and why. This list may only shrink.
ALLOWED = {
    "graph/export/lift.py": "graph stands below operators: makes memory, reads sizes and rows",
    "graph/export/opaque.py": "graph stands below operators: what recurrent modules call",
    "graph/export/tidy.py": "what export adds: copies, casts, views that are written to",
    "graph/costs.py": "torch's flop registry goes by packets, below any spelling",
    "lower/kernels/lowbit.py": "the kernel that runs: PyTorch's products with packed weights",
    "lower/kernels/pooling.py": "the kernel that runs: PyTorch's pooling of quantized volumes",
    "lower/kernels/views.py": "what gives a tensor the memory of another one",
    "runtime/replay/record.py": "how recorded calls set storages, no operators of models",
}


def _named(tree: ast.Module) -> Iterator[int]:
    yield from (node.lineno for node in ast.walk(tree) if names_overload(node))


def test_overloads_are_named_in_records() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        lines = sorted(set(_named(ast.parse(path.read_text(encoding="utf-8")))))
        if lines and not name.startswith("operators/"):
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert sorted(found) == sorted(ALLOWED), "a file of ALLOWED names none any more"


def test_a_named_overload_is_seen() -> None:
    for text in ("torch.ops.aten.add.Tensor", "_aten.add", "'aten.add.Tensor'"):
        assert list(_named(ast.parse(f"x = {text}"))) != [], text
    for text in ("torch.ops.aten", "torch.ops.backquant.add.default", "'aten.add(requantized)'"):
        assert list(_named(ast.parse(f"x = {text}"))) == [], text
