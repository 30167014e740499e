"""Figures of a source tree for docs/architecture.md: its size, and where a fact is written more than once.

python tools/tree_figures.py                 # this tree
python tools/tree_figures.py --commit REV    # that of a commit
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Names of PyTorch's dtypes.
DTYPE = re.compile(r"q?u?int\d+(x\d)?|b?float\d+(_\w+)?|half|double|float|long|short|bool")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources(commit: str) -> dict[str, str]:
    """Every text file of ``src`` by its path: of the work tree where ``commit`` is empty."""
    listed = ["ls-tree", "-r", "--name-only", commit, "src"] if commit else ["ls-files", "src"]
    files = {}
    for path in _git(*listed).splitlines():
        if commit or (ROOT / path).is_file():
            files[path] = _git("show", f"{commit}:{path}") if commit else _read(ROOT / path)
    return files


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True)
    return found.stdout.decode(errors="replace")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def code_lines(text: str) -> int:
    """Lines of Python that are no docstring, comment or blank line.

    >>> code_lines('"Doc."\\n\\nx = 1  # one\\n# two\\n')
    1
    """
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def dtype_tables(text: str) -> Iterator[int]:
    """The lines of dicts that have three PyTorch dtypes or more as keys.

    >>> list(dtype_tables("a = {torch.int8: 1, torch.int16: 2, torch.int32: 3}"))
    [1]
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict) and sum(map(_is_dtype, node.keys)) >= 3:
            yield node.lineno


def _is_dtype(key: ast.expr | None) -> bool:
    is_torch = isinstance(key, ast.Attribute) and ast.unparse(key.value) == "torch"
    return is_torch and DTYPE.fullmatch(key.attr) is not None  # type: ignore[union-attr]


def names_overload(node: ast.AST) -> bool:
    """``torch.ops.aten.add.Tensor``, ``_aten.add.Tensor``, ``_aten.add``, ``"aten.add.Tensor"``."""
    if isinstance(node, ast.Attribute):
        return any(name in ("aten", "_aten") for name in ast.unparse(node).split(".")[:-1])
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and re.fullmatch(r"aten\.\w+\.\w+", node.value) is not None


def figures(files: Mapping[str, str]) -> dict[str, str]:
    """What the table in docs/architecture.md says of a tree."""
    python = {path: text for path, text in files.items() if path.endswith(".py")}
    tables = [f"{path}:{line}" for path, text in python.items() for line in dtype_tables(text)]
    outside = {path: text for path, text in python.items() if "/operators/" not in path}
    naming = [
        p for p, text in outside.items() if any(map(names_overload, ast.walk(ast.parse(text))))
    ]
    set_float = [path for path, text in python.items() if "outcome=Outcome.FLOAT" in text]
    code = sum(map(code_lines, python.values()))
    return {
        "lines of src": f"{sum(text.count(chr(10)) for text in files.values()):,}",
        "files of src": f"{len(files):,}",
        "lines of Python without docstrings, comments and blank lines": f"{code:,}",
        "tables with three PyTorch dtypes or more as keys": f"{len(tables)}: {', '.join(tables)}",
        "files outside of operators/ that name aten overloads": f"{len(naming)}",
        "files that set an outcome to float": f"{len(set_float)}: {', '.join(set_float)}",
    }


def extensions() -> dict[str, int]:
    """Of each package in ``examples/extensions``, how many files it has; none of them is in ``src``."""
    listed = _git("ls-files", "examples/extensions").splitlines()
    names = sorted({path.split("/")[2] for path in listed if path.count("/") > 2})
    return {name: sum(path.split("/")[2] == name for path in listed) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--commit", default="", help="default: the work tree")
    commit = parser.parse_args().commit
    for what, found in figures(sources(commit)).items():
        print(f"{what}: {found}")
    if not commit:
        print("files of the packages in examples/extensions:", extensions())


if __name__ == "__main__":
    main()
