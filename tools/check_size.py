"""List files, functions, parameter lists and nesting that are over the limits, with their reasons.

Limits: 400 lines a file, 50 lines a function, 6 parameters, nesting 4. Something over a limit needs
a reason: a comment ``# size: <why>`` on the line of the ``def`` (or directly above it), or among the
first 30 lines of the file. What is over without a reason makes the check fail.

Usage: python tools/check_size.py src/backquant
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS, MAX_NESTING = 400, 50, 6, 4
MARK = "# size:"
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


def reason_at(lines: list[str], number: int) -> str | None:
    """The reason on line ``number`` (1-based), the line above, or the signature's next lines."""
    for index in (number - 1, number - 2):
        if 0 <= index < len(lines) and MARK in lines[index]:
            return lines[index].split(MARK, 1)[1].strip()
    return None


def findings(path: Path) -> Iterator[tuple[str, str | None]]:
    """Each thing over a limit, with its reason or None."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if len(lines) > MAX_FILE:
        head = next((line for line in lines[:30] if MARK in line), None)
        yield f"{path}: {len(lines)} lines", head.split(MARK, 1)[1].strip() if head else None
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
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            reason = reason_at(lines, node.lineno) or reason_at(lines, first)
            yield f"{path}:{node.lineno} {node.name}: {', '.join(over)}", reason


def main(roots: list[str]) -> int:
    missing = 0
    for root in roots:
        for path in sorted(Path(root).rglob("*.py")):
            for what, reason in findings(path):
                print(f"{what}  –  {reason or 'NO REASON'}")
                missing += reason is None
    if missing:
        print(f"{missing} without a reason: shorten, or say why with `{MARK} <why>`")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
