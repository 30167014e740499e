"""List what is over the sizes that a reader takes in at once, for review: this is advice, and never fails.

Functions over 50 lines, 6 parameters or 4 levels of nesting; files over 600 lines.

    python tools/check_size.py src/backquant
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS, MAX_NESTING = 600, 50, 6, 4
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest chain of blocks below ``node``; an ``elif`` does not nest, nor does an inner function."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        step = 1 if isinstance(child, BLOCKS) and not is_elif else 0
        deepest = max(deepest, nesting(child, depth + step))
    return deepest


def body_lines(node: Function) -> int:
    """Lines of the function without its docstring."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def parameters(node: Function) -> int:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def findings(path: Path) -> Iterator[str]:
    """What is over a size in one file."""
    text = path.read_text(encoding="utf-8")
    if (length := text.count("\n")) > MAX_FILE:
        yield f"{path}: {length} lines"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, Function):
            continue
        over = []
        if (length := body_lines(node)) > MAX_FUNCTION:
            over.append(f"{length} lines")
        if (count := parameters(node)) > MAX_PARAMETERS and node.name != "__init__":
            over.append(f"{count} parameters")
        if (depth := nesting(node)) > MAX_NESTING:
            over.append(f"nesting {depth}")
        if over:
            yield f"{path}:{node.lineno} {node.name}: {', '.join(over)}"


def main(roots: list[str]) -> None:
    for root in roots:
        for path in sorted(Path(root).rglob("*.py")):
            for what in findings(path):
                print(what)


if __name__ == "__main__":
    main(sys.argv[1:])
