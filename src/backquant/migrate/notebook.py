"""Migration of notebooks: their code cells are one program, read in order.

The cells become one source, with a comment before each that says where it begins, and lines that
are IPython's and not Python's turned into comments or ``pass``. The migrated source is cut at these
comments again. Cells that are not Python (``%%bash``), outputs and everything else stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from backquant.json_text import read_json
from backquant.migrate.source import FileResult, Finding, mentions_quantization, migrate_source

_MARK = "# <backquant cell {}>"
_MARK_LINE = re.compile(r"^[ \t]*# <backquant cell (\d+)>$")
_MAGIC = "# <backquant line> "
_MAGIC_LINE = re.compile(r"^(?P<indent>[ \t]*)(?:pass  )?# <backquant line> (?P<line>.*)$")
#: Cell magics whose cell is Python all the same.
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")


def migrate_notebook(text: str, path: str = "<notebook>") -> FileResult:
    """Rewrite the code cells of a notebook (nbformat 4); outputs and layout of the file stay.

    Findings name the cell, counted from 0 over all cells, and the line in it. A file that is no such
    notebook, or whose layout a JSON writer would not reproduce, is a finding and stays as it is.

    >>> cell = {"cell_type": "code", "source": ["from torch.quantization import QConfig"]}
    >>> text = json.dumps({"cells": [cell], "nbformat": 4}, indent=1)
    >>> "from backquant.ao.quantization import QConfig" in migrate_notebook(text).after
    True
    """
    if not mentions_quantization(text):
        return FileResult(path, text, text)
    try:
        notebook = read_json(text)
        cells = _python_cells(notebook)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return _left(text, path, "this is not a notebook of nbformat 4", str(error))
    write = _writer(notebook, text)
    result = migrate_source(_joined(cells), path)
    findings = tuple(_in_cell(finding, _joined(cells)) for finding in result.findings)
    if not result.changed:
        return FileResult(path, text, text, findings)
    parts = _cut(result.after)
    if write is None or list(parts) != list(cells):
        return _left(text, path, "the notebook cannot be written back as it was", "its layout")
    for index, source in parts.items():
        old = notebook["cells"][index]["source"]
        as_list = isinstance(old, list)
        notebook["cells"][index]["source"] = source.splitlines(True) if as_list else source
    return FileResult(path, text, write(notebook), findings)


def _left(text: str, path: str, what: str, why: str) -> FileResult:
    how = "open it in Jupyter, save it, and run migrate again; or change the cells by hand"
    return FileResult(path, text, text, (Finding(path, 0, 0, "notebook", what, why, how),))


def _python_cells(notebook: Any) -> dict[int, str]:
    """The sources of the code cells that are Python, by index."""
    language = notebook.get("metadata", {}).get("kernelspec", {}).get("language", "python")
    if language != "python":
        return {}
    cells: dict[int, str] = {}
    for index, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        first = source.lstrip().split("\n", 1)[0]
        foreign = first.startswith("%%") and not first.startswith(_PYTHON_CELLS)
        if cell["cell_type"] == "code" and not foreign:
            cells[index] = source
    return cells


def _joined(cells: dict[int, str]) -> str:
    return "".join(
        f"{_MARK.format(index)}\n" + "".join(f"{_hidden(line)}\n" for line in source.split("\n"))
        for index, source in cells.items()
    )


def _hidden(line: str) -> str:
    """A line that only IPython understands as one that Python does."""
    stripped = line.lstrip()
    if not stripped.startswith(("%", "!", "?")) and not re.fullmatch(r"[\w.]+\?{1,2}", stripped):
        return line
    indent = line[: len(line) - len(stripped)]
    return f"{indent}{'pass  ' if indent else ''}{_MAGIC}{stripped}"


def _cut(source: str) -> dict[int, str]:
    """The cells of a joined source; the last line of each has no line end, as in the file."""
    cells: dict[int, list[str]] = {}
    current: list[str] = []
    for line in source.split("\n")[:-1]:
        mark = _MARK_LINE.match(line)
        if mark is not None:
            current = cells.setdefault(int(mark[1]), [])
            continue
        hidden = _MAGIC_LINE.match(line)
        current.append(line if hidden is None else hidden["indent"] + hidden["line"])
    return {index: "\n".join(lines) for index, lines in cells.items()}


def _in_cell(finding: Finding, joined: str) -> Finding:
    """The finding with its cell, and its line in that cell."""
    marks: Iterator[tuple[int, str]] = (
        (number, mark[1])
        for number, line in enumerate(joined.split("\n"), 1)
        if (mark := _MARK_LINE.match(line)) is not None and number < max(finding.line, 2)
    )
    number, cell = list(marks)[-1]
    return replace(finding, path=f"{finding.path}#cell {cell}", line=max(finding.line - number, 0))


def _writer(notebook: Any, text: str) -> Callable[[Any], str] | None:
    """The way of writing that gives the file's text; None when no usual one does."""
    for indent, ascii_only, end in product((1, 2, 4, None), (False, True), ("\n", "")):
        write = partial(_written, indent=indent, ensure_ascii=ascii_only, end=end)
        if write(notebook) == text:
            return write
    return None


def _written(notebook: Any, *, end: str, **layout: Any) -> str:
    return json.dumps(notebook, **layout) + end
