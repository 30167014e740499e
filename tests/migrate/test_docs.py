"""docs/migrating.md: its tables are those of the package, its examples are true.

``BACKQUANT_WRITE_MESSAGES=1`` writes the tables; read the diff before committing it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from backquant.ao.left_out import GROUPS
from backquant.migrate import migrate_source
from backquant.migrate.source import HOLDING

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


def by_hand_table() -> str:
    lines = ["| what | why | what to do |", "| --- | --- | --- |"]
    for group in GROUPS.values():
        kind = group.kind + (" (the file stays as it is)" if group in HOLDING else "")
        lines.append(f"| {kind} | {group.why} | {group.fix} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("mark", "table"), [("by hand", by_hand_table)])
def test_tables(mark: str, table: object) -> None:
    pattern = re.compile(rf"(<!-- {mark}: [^\n]*-->\n)(.*?)(<!-- end -->)", re.S)
    text = PAGE.read_text(encoding="utf-8")
    wanted = table() + "\n"  # type: ignore[operator]
    if os.environ.get("BACKQUANT_WRITE_MESSAGES"):
        text = pattern.sub(lambda found: found[1] + wanted + found[3], text)
        PAGE.write_text(text, encoding="utf-8")
    found = pattern.search(text)
    assert found is not None
    assert found[2] == wanted


def test_every_kind_that_is_reported_of_names_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| {group.kind}" in text for group in GROUPS.values())


def test_examples_are_true() -> None:
    """The rows of the table that are code: their left side becomes their right side."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.split("## What is rewritten")[1].split("##")[0]
    rows = re.findall(r"^\| `([^`]*)` \| `([^`]*)` \|$", section, re.M)
    for before, after in rows:
        code = f"import torch\n{before}" if before.startswith("torch.") else before
        assert migrate_source(code + "\n").after.splitlines()[-1] == after
    assert len(rows) >= 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # PyTorch's
def test_objects_at_run_time() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        exec(compile(block, "docs/migrating.md", "exec"), names)
    quantized, x = names["quantized"], names["x"]
    assert quantized.kernels
    torch.testing.assert_close(quantized(x), names["model"](x), rtol=0, atol=0.1)
