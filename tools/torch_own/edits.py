"""The only edits of PyTorch's test files: the prefix, and the statements that use TorchScript.

1. ``torch.ao.`` is ``backquant.ao.``, as ``sed 's/torch\\.ao\\./backquant.ao./g'`` does, and so is
   ``torch.ao`` in ``from torch.ao import``; ``import backquant.ao`` stands first, since ``import torch``
   brings ``torch.ao`` too.
2. A simple statement whose code names ``torch.jit`` goes, and so do those after it in its block that read
   what it alone assigned; ``pass`` where nothing is left of a block.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = ["TORCHSCRIPT", "uses_left_out", "with_prefix", "without_torchscript"]

TORCHSCRIPT = "uses TorchScript"
_COMPOUND = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.If,
    ast.For,
    ast.While,
    ast.With,
    ast.Try,
)


def with_prefix(text: str) -> str:
    """``text`` with ``backquant.ao`` for ``torch.ao``.

    >>> print(with_prefix("import torch.ao.nn.quantized as nnq"))
    import backquant.ao; import backquant.ao.nn.quantized as nnq
    """
    text = re.sub(r"\btorch\.ao\.", "backquant.ao.", text)
    text = re.sub(r"\bfrom torch\.ao import\b", "from backquant.ao import", text)
    return "import backquant.ao; " + text  # on the first line, so that lines keep their numbers


def without_torchscript(text: str) -> str:
    r"""``text`` without the simple statements that name ``torch.jit``; lines keep their numbers.

    >>> print(without_torchscript("if x:\n    m = torch.jit.script(\n        m)\nm(1)"))
    if x:
        pass
    <BLANKLINE>
    m(1)
    """
    lines = text.split("\n")
    for block in _blocks(ast.parse(text)):
        gone = _scripted(block)
        for statement in gone:
            first, last = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
            lines[first : last + 1] = [""] * (last - first + 1)
        if gone and len(gone) == len(block):
            lines[gone[0].lineno - 1] = " " * gone[0].col_offset + "pass"
    return "\n".join(lines)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _scripted(block: list[ast.stmt]) -> list[ast.stmt]:
    """The simple statements of ``block`` that name ``torch.jit``, or read what only such ones assigned."""
    gone: list[ast.stmt] = []
    scripts: set[str] = set()
    for statement in block:
        read, assigned = _names(statement, ast.Load), _names(statement, ast.Store)
        simple = not isinstance(statement, _COMPOUND)
        if simple and (_names_torchscript(statement) or read & scripts):
            gone.append(statement)
            scripts |= assigned
        else:
            scripts -= assigned
    return gone


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    return {
        part.id
        for part in ast.walk(statement)
        if isinstance(part, ast.Name) and isinstance(part.ctx, context)
    }


def _names_torchscript(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Attribute) and ast.unparse(part) == "torch.jit"
        for part in ast.walk(node)
    )


def uses_left_out(text: str) -> dict[str, str]:
    """The tests whose own body names ``torch.jit``, or a name of ``torch.ao`` that begins with an underscore.

    >>> uses_left_out('''
    ... from torch.ao.quantization.fx import _step
    ... class T:
    ...     def test_a(self): _step(1)
    ...     def test_b(self): torch.jit.script(1)
    ...     def test_c(self): self._helper(1)
    ... ''')
    {'T.test_a': 'names _step', 'T.test_b': 'uses TorchScript'}
    """
    tree = ast.parse(text)
    private = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.ao")
        for alias in node.names
        if alias.name.startswith("_")
    }
    reasons = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for test in cls.body:
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test"):
                reason = _reason(test, private)
                if reason:
                    reasons[f"{cls.name}.{test.name}"] = reason
    return reasons


def _reason(test: ast.FunctionDef, private: set[str]) -> str:
    if _names_torchscript(test):
        return TORCHSCRIPT
    named = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)} & private
    for part in ast.walk(test):
        if isinstance(part, ast.Attribute) and part.attr.startswith("_"):
            path = ast.unparse(part)
            if re.fullmatch(r"torch\.ao(\.\w+)+", path):
                named.add(part.attr)
    return f"names {', '.join(sorted(named))}" if named else ""
